// Several instances with a share of the quota each: the lanes show what one shared quota would have allowed.

import { assert, ask, drive } from "./browser.mjs";

await drive(
  async (page) => {
    const { lanes } = await ask("v1/simulate", await page.evaluate(() => window.tallygate.scenario()));
    for (const [index, { allowed, division }] of lanes.entries()) {
      const notes = await page.locator("#lanes .lane").nth(index).locator(".notes").allTextContents();
      assert.ok(division.allowed_if_shared > allowed && division.denied_with_room_elsewhere > 0);
      assert.ok(notes.join().includes(`one shared quota: ${division.allowed_if_shared} allowed`), `${notes}`);
      const elsewhere = `${division.denied_with_room_elsewhere} denied although another instance had room`;
      assert.ok(notes.join().includes(elsewhere), `${notes}`);
    }
    // An explanation names the instance and uses its share.
    await page.locator("#lanes .strip").first().focus();
    await page.keyboard.press("Home");
    await page.keyboard.press("Enter");
    await page.locator(".verdict", { hasText: /on instance [123]: / }).waitFor();
    const symbols = await page.locator(".symbols tr").allTextContents();
    assert.ok(symbols.some((row) => /^Llimit: the units per window[34]$/.test(row)), `${symbols}`);
  },
  { address: "#compare?pattern=bursty&instances=3&rate_per_minute=60&burst_size=10" },
);
