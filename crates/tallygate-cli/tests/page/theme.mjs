// The theme follows the system or the user's choice; text is legible in both themes.

import { assert, drive, openTab } from "./browser.mjs";

const MIN_CONTRAST = 4.5;

/** Returns texts with too little contrast to their background. */
const illegible = (page) =>
  page.evaluate((least) => {
    const parts = (color) => color.match(/[\d.]+/g).map(Number);
    const over = (front, back) => {
      const alpha = front[3] ?? 1;
      return front.slice(0, 3).map((value, index) => value * alpha + back[index] * (1 - alpha));
    };
    const behind = (element) => {
      const layers = [];
      for (let at = element; at; at = at.parentElement)
        layers.push(parts(getComputedStyle(at).backgroundColor));
      return layers.reverse().reduce((back, front) => over(front, back), [255, 255, 255]);
    };
    const light = (color) => {
      const [red, green, blue] = color.map((value) =>
        value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4,
      );
      return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const contrast = (one, other) => {
      const [dark, bright] = [light(one), light(other)].sort((one, other) => one - other);
      return (bright + 0.05) / (dark + 0.05);
    };
    const texts = [...document.querySelectorAll("body *")].filter(
      (element) =>
        element.checkVisibility() &&
        [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim()) &&
        !element.disabled,
    );
    return texts
      .map((element) => {
        const back = behind(element);
        const ratio = contrast(over(parts(getComputedStyle(element).color), back), back);
        return { text: element.textContent.trim().slice(0, 40), ratio };
      })
      .filter(({ ratio }) => ratio < least);
  }, MIN_CONTRAST);

const pixels = (page) => page.evaluate(() => document.querySelector("#lanes canvas").toDataURL());
const colors = (page) =>
  page.evaluate(() => {
    const { backgroundColor, color } = getComputedStyle(document.body);
    return [backgroundColor, color];
  });

const seen = {};
for (const scheme of ["light", "dark"]) {
  await drive(
    async (page) => {
      seen[scheme] = { colors: await colors(page), pixels: await pixels(page) };
      for (const name of ["Compare", "Explain", "Clients", "Live", "Backtest"]) {
        await openTab(page, name);
        if (name === "Explain") await page.locator(".steps-of li").first().waitFor();
        if (name === "Clients") {
          await page.getByRole("button", { name: "Send 10" }).first().click();
          await page.locator(".history .denied").first().waitFor();
        }
        if (name === "Live") await page.locator("#live table").first().waitFor();
        assert.deepEqual(await illegible(page), [], `${scheme} ${name}`);
      }
    },
    { colorScheme: scheme },
  );
}
assert.notDeepEqual(seen.light.colors, seen.dark.colors);
assert.notEqual(seen.light.pixels, seen.dark.pixels);

// The user's choice overrides the system and is stored.
await drive(
  async (page) => {
    assert.deepEqual(await colors(page), seen.light.colors);
    const button = page.locator("#theme");
    await button.click();
    await button.click();
    assert.equal(await button.textContent(), "Theme: dark");
    assert.deepEqual(await colors(page), seen.dark.colors);
    await page.waitForFunction(
      (dark) => document.querySelector("#lanes canvas").toDataURL() === dark,
      seen.dark.pixels,
    );
    await page.reload();
    assert.deepEqual(await colors(page), seen.dark.colors);
  },
  { colorScheme: "light" },
);
