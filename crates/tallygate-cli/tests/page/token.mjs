// With a token in the configuration, only its owner sees clients; everything else is public.

import { assert, ask, drive, openTab } from "./browser.mjs";

await drive(
  async (page) => {
    await openTab(page, "Live");
    await ask("v1/check", { checks: Array.from({ length: 100 }, () => ({ policy: "api", key: "greedy" })) });
    await page.locator(".live .about", { hasText: "need an admin token" }).waitFor();
    await page.locator("tr", { hasText: "95.0 %" }).waitFor();

    const token = page.locator("input[name=token]");
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
