// A link that ends in `#token=…` passes the token to the page, which removes it from the address at once.

import { assert, ask, drive, openTab } from "./browser.mjs";

const token = process.env.ONE_TIME_TOKEN;
assert.match(token, /^[0-9a-f]{64}$/);

await drive(
  async (page) => {
    await openTab(page, "Live");
    await ask("v1/check", { checks: Array.from({ length: 100 }, () => ({ policy: "demo", key: "greedy" })) });
    await page.locator("td", { hasText: "greedy" }).first().waitFor();
    assert.ok(!page.url().includes(token));
  },
  { address: `#token=${token}` },
);
