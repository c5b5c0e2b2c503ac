// On a phone nothing is wider than the screen, and every control is large enough for a thumb.

import { assert, drive, openTab, plotted, redrawn } from "./browser.mjs";

await drive(
  async (page) => {
    for (const name of ["Compare", "Explain", "Clients", "Live", "Backtest"]) {
      await openTab(page, name);
      const { wide, small } = await page.evaluate(() => {
        const inSight = (element) => element.checkVisibility() && element.getBoundingClientRect().width > 0;
        const pressed = [...document.querySelectorAll("main button, [role=tab], main select")].filter(
          inSight,
        );
        return {
          wide: document.documentElement.scrollWidth,
          small: pressed
            .filter((element) => element.getBoundingClientRect().height < 28)
            .map((element) => element.outerHTML.slice(0, 80)),
        };
      });
      assert.ok(wide <= 390, `${name} is ${wide} wide`);
      assert.deepEqual(small, [], name);
    }
    // The results of a backtest are readable: no policy or address is broken into a column of letters.
    const address = "2001:db8:1234:5678::/64";
    const time = (second) => `[14/Nov/2023:22:13:${String(second % 60).padStart(2, "0")} +0000]`;
    const lines = Array.from(
      { length: 60 },
      (_, second) => `${address.replace("/64", "1")} - - ${time(second)} "GET / HTTP/1.1" 200 5 "-" "-"`,
    );
    await page
      .locator("input[name=log]")
      .setInputFiles({ name: "access.log", mimeType: "text/plain", buffer: Buffer.from(`${lines.join("\n")}\n`) });
    await page.locator("textarea[name=policies]").fill("sliding_window_counter 15/1m\ntoken_bucket 10/1m burst 20");
    await page.getByRole("button", { name: "Run" }).click();
    const policy = page.locator(".results td", { hasText: /^sliding_window_counter 15/ }).first();
    await policy.waitFor();
    assert.ok((await policy.boundingBox()).height < 60, JSON.stringify(await policy.boundingBox()));
    for (const shown of await page.locator(".results td code").all()) {
      const lines = await shown.evaluate((code) => {
        const range = new Range();
        range.setStart(code.firstChild, 0);
        range.setEnd(code.firstChild, code.textContent.indexOf(" "));
        return range.getClientRects().length;
      });
      assert.equal(lines, 1, `the algorithm is broken in ${await shown.textContent()}`);
    }
    const client = await page.locator(".results td", { hasText: address }).first().boundingBox();
    assert.ok(client.height < 40, JSON.stringify(client));
    const wide = await page.evaluate(() => document.documentElement.scrollWidth);
    assert.ok(wide <= 390, `the results of a backtest are ${wide} wide`);

    // The numbers beside an address fit as well.
    const denied = page.locator(".results .box", { hasText: "Clients denied most" }).last();
    const [inner, outer] = await denied.evaluate((box) => [box.scrollWidth, box.clientWidth]);
    assert.ok(inner <= outer, `the most denied clients are ${inner} wide in ${outer}`);

    // With shadow limits, which add a column, the counts of the live view still fit.
    await page.route("**/metrics", async (route) => {
      const response = await route.fetch();
      const shadow = 'tallygate_shadow_denials_total{policy="demo",limit="trial"} 7';
      await route.fulfill({ response, body: `${shadow}\n${await response.text()}` });
    });
    await openTab(page, "Live");
    const policies = page.locator("table", { hasText: "Since the server started" });
    await policies.locator("td[data-column='denied by shadow limits']").first().waitFor();
    for (const cell of await policies.locator("td").all()) {
      const box = await cell.boundingBox();
      assert.ok(box.height < 40 && box.x + box.width <= 390, `${await cell.textContent()}: ${JSON.stringify(box)}`);
    }

    await openTab(page, "Compare");
    for (const control of await page.locator("#scenario input:visible, #playback input:visible").all()) {
      await control.scrollIntoViewIfNeeded();
      const box = await control.boundingBox();
      assert.ok(box.x >= 0 && box.x + box.width <= 390, JSON.stringify(box));
    }
    const before = await plotted(page);
    const box = await page.locator("input[name=limit]").boundingBox();
    await redrawn(page, () => page.touchscreen.tap(box.x + box.width * 0.7, box.y + box.height / 2));
    assert.notDeepEqual((await plotted(page))[0].cumulative, before[0].cumulative);
  },
  { viewport: { width: 390, height: 844 }, hasTouch: true, isMobile: true, deviceScaleFactor: 2 },
);
