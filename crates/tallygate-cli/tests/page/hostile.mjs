// A client or policy named `<script>` is shown as text in every view and does not run.

import { assert, ask, drive, openTab } from "./browser.mjs";

const NAMES = [
  "<script>alert(1)</script>",
  "<img src=x onerror=alert(2)>",
  '"><svg onload=alert(3)>',
  "javascript:alert(4)",
  "{{constructor.constructor('alert(5)')()}}",
  "\u202Eecila</td><td>\u0000\uFFFD🦀",
];
const POLICY = "<img src=x onerror=alert(1)>";

const elements = (page) =>
  page.evaluate(() => document.querySelectorAll("main script, main img, main svg, main iframe").length);

await drive(async (page) => {
  await openTab(page, "Clients");
  await page.locator("select[name=policy]").selectOption(POLICY);
  for (const name of NAMES) {
    await page.locator("input[name=new-client]").fill(name);
    await page.keyboard.press("Enter");
    const card = page.locator(".card").last();
    assert.equal(await card.locator(".client-name").inputValue(), name);
    await card.getByRole("button", { name: "Send 1", exact: true }).click();
    await card.locator(".counts", { hasText: "1 allowed" }).waitFor();
    await card.getByRole("button", { name: "Send 1", exact: true }).click();
    await card.locator(".counts", { hasText: "1 denied" }).waitFor();
  }
  const body = JSON.parse(await page.locator(".reply code").textContent());
  assert.equal(body.policy, POLICY);
  assert.equal(await elements(page), 0);

  // The counts are sampled, so each client sends enough requests to be in the sample.
  await ask("v1/check", {
    checks: NAMES.flatMap((key) => Array.from({ length: 64 }, () => ({ policy: POLICY, key }))),
  });
  await openTab(page, "Live");
  const table = page.locator("table", { hasText: "Most denied clients" });
  for (const name of NAMES) {
    await page.waitForFunction(
      (name) => [...document.querySelectorAll(".live td")].some((cell) => cell.textContent === name),
      name,
    );
  }
  assert.ok((await table.locator("td").allTextContents()).includes(POLICY));
  await page.locator(".live .legend", { hasText: POLICY }).waitFor();
  assert.equal(await elements(page), 0);
});
