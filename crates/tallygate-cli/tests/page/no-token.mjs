// A server without admin tokens does not ask for one, because none would help. It says what to configure.

import { assert, drive, openTab } from "./browser.mjs";

const says = "admin requests are disabled: configure a token in `[auth] admin`";

await drive(
  async (page) => {
    await openTab(page, "Live");
    await page.locator(".live .about", { hasText: says }).waitFor();
    assert.equal(await page.locator("#live input[name=token]").isVisible(), false);

    await openTab(page, "Backtest");
    const log = { name: "access.log", mimeType: "text/plain", buffer: Buffer.from("time,ip\n1700000000,192.0.2.1\n") };
    await page.locator("input[name=log]").setInputFiles(log);
    await page.getByRole("button", { name: "Run" }).click();
    await page.locator(".backtest .problem", { hasText: says }).waitFor();
    assert.equal(await page.locator("#backtest input[name=token]").isVisible(), false);
  },
  { expected: [/403 .*v1\/admin\/hot/, /403 .*v1\/backtest/] },
);
