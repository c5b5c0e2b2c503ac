// Live: what is shown are the server's own counts.

import { assert, ask, drive, openTab } from "./browser.mjs";

const tile = (page, label) => page.locator(".tile", { hasText: label }).locator("output");

await drive(async (page) => {
  await openTab(page, "Live");
  await page.locator("table", { hasText: "Since the server started" }).waitFor();
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
  assert.deepEqual(await row.locator("td").allTextContents(), ["api", "55", "145", "72.5 %"]);
  await page.waitForFunction(() => parseFloat(document.querySelector(".tile output").textContent) > 0);
  assert.match(await tile(page, "latency, median").textContent(), /^≈ [\d.]+ (µs|ms)$/);
  await page
    .locator("table", { hasText: "The most refused clients" })
    .locator("td", { hasText: "greedy" })
    .waitFor();
  await page.locator(".live .legend", { hasText: "api, refused" }).waitFor();
  // The rate of the second in which they came is drawn.
  const canvas = page.locator(".live canvas");
  assert.ok((await canvas.boundingBox()).width > 600);
});
