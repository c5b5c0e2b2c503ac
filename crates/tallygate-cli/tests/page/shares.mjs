// Small shares are shown, and a share is shown as none or all only if it is. Steps of time have their largest unit.

import { assert, drive } from "./browser.mjs";

await drive(async (page) => {
  const shown = await page.evaluate(async () => {
    const { percent } = await import("./page/units.js");
    return [
      [0, 7],
      [1, 1_000_000],
      [3, 10_000],
      [1, 3],
      [9_995, 10_000],
      [999_999, 1_000_000],
      [7, 7],
      [0, 0],
    ].map(([part, whole]) => percent(part, whole));
  });
  const steps = await page.evaluate(async () => {
    const { wholeSpan } = await import("./page/units.js");
    return [1, 15, 60, 300, 3600, 21_600, 86_400].map((seconds) => wholeSpan(seconds));
  });
  assert.deepEqual(steps, ["1 s", "15 s", "1 min", "5 min", "1 h", "6 h", "1 d"]);
  assert.deepEqual(shown, ["0 %", "< 0.001 %", "0.03 %", "33.3 %", "99.95 %", "> 99.999 %", "100 %", "–"]);
});
