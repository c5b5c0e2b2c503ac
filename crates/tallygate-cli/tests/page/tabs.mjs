// Every tab opens by mouse and by keyboard, and only one is visible.

import { assert, drive } from "./browser.mjs";

const TABS = ["Compare", "Explain", "Clients", "Live", "Backtest"];

async function isOpen(page, name) {
  const panel = page.getByRole("tabpanel");
  assert.equal(await panel.count(), 1);
  assert.equal(await panel.getAttribute("aria-labelledby"), `tab-${name.toLowerCase()}`);
  assert.equal(await page.getByRole("tab", { name }).getAttribute("aria-selected"), "true");
  assert.match(page.url(), new RegExp(`#${name.toLowerCase()}`));
}

await drive(async (page) => {
  for (const name of TABS.toReversed()) {
    await page.getByRole("tab", { name }).click();
    await isOpen(page, name);
  }
  await page.getByRole("tab", { name: "Compare" }).focus();
  for (const name of TABS.slice(1)) {
    await page.keyboard.press("ArrowRight");
    await isOpen(page, name);
  }
  await page.keyboard.press("ArrowRight");
  await isOpen(page, "Compare");
  await page.keyboard.press("End");
  await isOpen(page, "Backtest");
  await page.keyboard.press("ArrowLeft");
  await isOpen(page, "Live");
  await page.keyboard.press("Home");
  await isOpen(page, "Compare");

  // The Tab key reaches every control, and the focus is visible.
  const reached = new Set();
  for (;;) {
    await page.keyboard.press("Tab");
    if (await page.evaluate(() => document.activeElement === document.body)) break;
    const focus = await page.evaluate(() => {
      const { name, className } = document.activeElement;
      const { outlineStyle, outlineWidth } = getComputedStyle(document.activeElement);
      return { name: name || className, isShown: outlineStyle !== "none" && parseFloat(outlineWidth) >= 2 };
    });
    assert.ok(focus.isShown, `the focus on ${focus.name} is not seen`);
    reached.add(focus.name);
  }
  for (const name of [
    "pattern",
    "limit",
    "window_ms",
    "burst",
    "rate_per_minute",
    "speed",
    "time",
    "strip",
    "limit-exact",
  ]) {
    assert.ok(reached.has(name), `${name} is not reached: ${[...reached]}`);
  }
});

// An address opens its tab.
await drive(async (page) => isOpen(page, "Live"), { address: "#live" });
await drive(async (page) => isOpen(page, "Compare"), { address: "#nonsense?limit=x" });
