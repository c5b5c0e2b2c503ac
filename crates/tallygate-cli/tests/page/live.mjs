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

// The label of a time at the right edge is whole. The clock hardly moves, so that the time stays there.
await drive(async (page) => {
  await page.addInitScript(() => {
    const start = Date.UTC(2026, 0, 2, 12, 30, 20);
    Date.now = () => start + performance.now() / 10_000;
  });
  await page.reload();
  await openTab(page, "Live");
  await page.locator(".live canvas").waitFor();
  // For each of the last 50 columns of the labels, from the right: whether something is drawn there.
  const near = await page.locator(".live canvas").evaluate((canvas) => {
    const [columns, below] = [50, 22 * devicePixelRatio];
    const { width, height } = canvas;
    const { data } = canvas.getContext("2d").getImageData(width - columns, height - below, columns, below);
    return Array.from({ length: columns }, (_, index) =>
      data.some((value, at) => at % 4 === 3 && value > 0 && Math.floor(at / 4) % columns === columns - 1 - index),
    );
  });
  assert.ok(near.some((ink) => ink), "there is a label at the edge");
  assert.deepEqual(near.slice(0, 4), [false, false, false, false]);
});
