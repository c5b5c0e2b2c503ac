// The server's error for an invalid scenario is shown beside the old lanes; the next scenario is drawn.

import { assert, drive, redrawn } from "./browser.mjs";

await drive(
  async (page) => {
    await redrawn(page, () => page.locator("select[name=pattern]").selectOption("steady"));
    await page.locator("input[name=rate_per_minute-exact]").fill("1000000");
    const problem = page.locator("#compare-problem");
    await problem.waitFor();
    assert.match(await problem.textContent(), /more than 20000 requests; use a lower "Rate" or a shorter "Duration"/);
    await redrawn(page, () => page.locator("input[name=rate_per_minute-exact]").fill("100"));
    await problem.waitFor({ state: "hidden" });

    // An invalid number is not sent.
    const before = await page.evaluate(() => window.tallygate.scenario().limit);
    await page.locator("input[name=limit-exact]").fill("-5");
    assert.equal(await page.evaluate(() => window.tallygate.scenario().limit), before);
    await page.locator("input[name=limit-exact]").fill("");
    assert.equal(await page.evaluate(() => window.tallygate.scenario().limit), before);
  },
  { expected: [/400 .*v1\/simulate/] },
);
