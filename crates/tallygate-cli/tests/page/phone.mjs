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
