// With a token in the configuration, only its owner sees clients; everything else is public.

import { assert, ask, drive, openTab } from "./browser.mjs";

await drive(
  async (page) => {
    await openTab(page, "Live");
    await ask("v1/check", { checks: Array.from({ length: 100 }, () => ({ policy: "api", key: "greedy" })) });
    await page.locator(".live .about", { hasText: "need an admin token" }).waitFor();
    await page.locator("tr", { hasText: "95.0 %" }).waitFor();

    const token = page.locator("#live input[name=token]");
    assert.equal(await token.getAttribute("type"), "password");
    await token.fill("sesame-of-another-user");
    const rejected = page.waitForResponse((reply) => reply.url().endsWith("hot") && reply.status() === 401);
    await page.keyboard.press("Enter");
    await rejected;
    await token.fill("sesame-of-the-operator");
    await page.keyboard.press("Enter");
    await page.locator("td", { hasText: "greedy" }).first().waitFor();
    assert.ok(!page.url().includes("sesame"));
    assert.equal(await page.evaluate(() => Object.values(localStorage).join()), "");

    // The token is stored for this tab and also used for the list of policies.
    await openTab(page, "Clients");
    await page.locator("select[name=policy]").waitFor();
  },
  { expected: [/401 .*v1\/admin\/hot/] },
);

// A backtest asks for the token where it is needed, and then runs.
await drive(
  async (page) => {
    const line = '192.0.2.1 - - [14/Nov/2023:22:13:20 +0000] "GET / HTTP/1.1" 200 5 "-" "-"\n';
    const log = { name: "access.log", mimeType: "text/plain", buffer: Buffer.from(line) };
    await page.locator("input[name=log]").setInputFiles(log);
    const token = page.locator("#backtest input[name=token]");
    assert.ok(!(await token.isVisible()));
    await page.getByRole("button", { name: "Run" }).click();
    await page.locator("#backtest .problem", { hasText: "Enter it here and press Use" }).waitFor();
    await token.fill("sesame-of-another-user");
    await page.keyboard.press("Enter");
    await page.locator("#backtest .problem", { hasText: "rejects this admin token" }).waitFor();
    await token.fill("sesame-of-the-operator");
    await page.keyboard.press("Enter");
    await page.locator("#backtest .results p", { hasText: "1 requests from 1 clients" }).waitFor();
    assert.ok(!(await token.isVisible()));

    // The other tabs use it, too.
    await openTab(page, "Live");
    await page.locator("#live caption", { hasText: "Busiest clients" }).waitFor();
    assert.ok(!(await page.locator("#live input[name=token]").isVisible()));
  },
  { address: "#backtest", expected: [/401 .*v1\/backtest/] },
);

// Without a token, the user types the name of the policy.
await drive(
  async (page) => {
    const name = page.locator("input[name=policy]");
    await name.waitFor();
    await name.fill("api");
    await page.getByRole("button", { name: "Send 1", exact: true }).first().click();
    await page.locator(".left", { hasText: "4 of 5" }).waitFor();
  },
  { address: "#clients", expected: [/401 .*v1\/policies/] },
);
