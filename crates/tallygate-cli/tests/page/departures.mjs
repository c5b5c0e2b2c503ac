// Every lane draws when allowed requests leave: a leaky bucket lets them leave evenly, a token bucket at once.

import { assert, drive, plotted } from "./browser.mjs";

const SECOND_US = 1_000_000;

await drive(
  async (page) => {
    const lanes = Object.fromEntries((await plotted(page)).map((lane) => [lane.algorithm, lane]));
    const { token_bucket: token, leaky_bucket: leaky } = lanes;
    assert.deepEqual(token.decisions.value, leaky.decisions.value);
    const arrivals = token.decisions.at_us.filter((_, index) => token.decisions.value[index]);
    assert.deepEqual(token.departures_us, arrivals);
    const gaps = leaky.departures_us.slice(1).map((at, index) => at - leaky.departures_us[index]);
    assert.ok(gaps.length > 20 && gaps.every((gap) => gap >= SECOND_US - 1), `${gaps}`);
    assert.ok(new Set(arrivals).size < arrivals.length / 4, "the requests arrive in groups");
    // The rows of departures are drawn, and differ.
    const rows = await page
      .locator("#lanes .leaving canvas")
      .evaluateAll((canvases) => canvases.map((canvas) => canvas.toDataURL()));
    assert.equal(rows.length, 6);
    assert.notEqual(rows[0], rows[1]);
    assert.equal(rows[0], rows[2], "GCRA lets requests leave as a token bucket does");
    await page.locator("#lanes .lane").nth(1).locator(".notes", { hasText: "longest delay: " }).waitFor();
    await page.locator("#legend", { hasText: "leaves, after its delay" }).waitFor();
    // A worst window above the limit is explained beside it.
    await page
      .locator("#lanes .lane")
      .first()
      .locator(".worst-reason", { hasText: "A burst of 10 at once, plus up to 9 earned back" })
      .waitFor();
  },
  { address: "#compare?pattern=bursty&burst_size=10&rate_per_minute=100" },
);
