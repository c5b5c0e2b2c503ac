// The live view shows the counts of the server.

import { assert, ask, drive, openTab } from "./browser.mjs";

const tile = (page, label) => page.locator(".tile", { hasText: label }).locator("output");

await drive(async (page) => {
  // A counter of a shadow limit, in addition to the metrics of the server.
  await page.route("**/metrics", async (route) => {
    const response = await route.fetch();
    const shadow = 'tallygate_shadow_denials_total{policy="brief",limit="trial"} 7';
    await route.fulfill({ response, body: `${shadow}\n${await response.text()}` });
  });
  await openTab(page, "Live");
  await page.locator("table", { hasText: "Since the server started" }).waitFor();
  // The axes have labels from the first reading on, and no token is asked for.
  const labels = () =>
    page.locator(".live canvas").evaluate((canvas) => {
      const { width, height } = canvas;
      const below = 22 * devicePixelRatio;
      const pixels = canvas.getContext("2d").getImageData(0, height - below, width, below).data;
      return pixels.filter((_, index) => index % 4 === 3).some((alpha) => alpha > 0);
    });
  assert.equal(await labels(), true);
  assert.equal(await page.locator("input[name=token]:visible").count(), 0);
  assert.equal(await tile(page, "store").textContent(), "memory");
  const checks = Array.from({ length: 200 }, (_, index) => ({
    policy: "api",
    key: index < 150 ? "greedy" : `other ${index}`,
  }));
  const { results } = await ask("v1/check", { checks });
  const allowed = results.filter((result) => result.allowed).length;
  assert.equal(allowed, 55);
  const row = page.locator("tr", { hasText: "72.5 %" });
  await row.waitFor();
  assert.deepEqual(await row.locator("td").allTextContents(), ["api", "55", "145", "72.5 %", "–"]);
  await page.waitForFunction(() => parseFloat(document.querySelector(".tile output").textContent) > 0);
  assert.match(await tile(page, "median latency").textContent(), /^≈ [\d.]+ (µs|ms)$/);
  await page
    .locator("table", { hasText: "Most denied clients" })
    .locator("td", { hasText: "greedy" })
    .waitFor();
  await page.locator(".live .legend", { hasText: "api, denied" }).waitFor();
  // Denials of shadow limits have their own column.
  const shadowed = page.locator("tr", { hasText: "brief" });
  await page.locator("th", { hasText: "denied by shadow limits" }).waitFor();
  assert.equal((await shadowed.first().locator("td").allTextContents()).at(-1), "7");
  // The rate during the requests is drawn.
  const canvas = page.locator(".live canvas");
  assert.ok((await canvas.boundingBox()).width > 600);
});
