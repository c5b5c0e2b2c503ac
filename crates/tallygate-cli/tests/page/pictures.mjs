// Takes the screenshots for the documentation: `pictures.mjs URL DIRECTORY`. Not a test; `scripts/screenshots` runs it.

import path from "node:path";
import { ask, drive as driven, openTab, redrawn } from "./browser.mjs";

const directory = process.argv[3];
const shoot = (page, name) => page.screenshot({ path: path.join(directory, `${name}.png`) });
// Animations are skipped to their end.
const drive = (run, options) => driven(run, { reducedMotion: "reduce", ...options });
const DESKTOP = { viewport: { width: 1280, height: 860 } };
// The printed token of the server, for the tabs that need an administrator.
const WITH_TOKEN = `#token=${process.env.ONE_TIME_TOKEN}`;
const PHONE = { viewport: { width: 390, height: 844 }, hasTouch: true, isMobile: true };

await drive((page) => shoot(page, "compare"), {
  address: "#compare",
  viewport: { width: 1280, height: 1130 },
});

await drive(
  async (page) => {
    await page.locator(".playback input[name=time]").fill("620");
    await page.locator("#lanes .strip").first().focus();
    for (let step = 0; step < 17; step += 1) await page.keyboard.press("ArrowRight");
    await shoot(page, "compare-dark");
  },
  { address: "#compare?pattern=poisson&rate_per_minute=110", colorScheme: "dark", ...DESKTOP },
);

await drive(
  async (page) => {
    await page.locator(".steps-of li").first().waitFor();
    await shoot(page, "explain");
  },
  {
    address: "#explain?pattern=poisson&rate_per_minute=110&algorithm=token_bucket",
    viewport: { width: 1280, height: 1000 },
  },
);

await drive(
  async (page) => {
    await openTab(page, "Clients");
    await page.locator(".left", { hasText: "5 of 5" }).first().waitFor();
    const press = (place, name) =>
      page.locator(".card").nth(place).getByRole("button", { name, exact: true }).click();
    for (let time = 0; time < 3; time += 1) await press(0, "Send 1");
    await press(1, "Send 10");
    await page.locator(".card").nth(1).locator(".history .denied").nth(4).waitFor();
    await page.locator("input[name=new-client]").fill("<script>alert(1)</script>");
    await page.keyboard.press("Enter");
    await press(3, "Send 10");
    await page.locator(".card").nth(3).locator(".history .denied").nth(4).waitFor();
    await shoot(page, "clients");
  },
  { address: WITH_TOKEN, viewport: { width: 1280, height: 660 } },
);

await drive(
  async (page) => {
    await openTab(page, "Live");
    for (let second = 0; second < 15; second += 1) {
      const checks = Array.from({ length: 40 + 60 * (second % 4) }, (_, index) => ({
        policy: "demo",
        key: `192.0.2.${(index * index) % 23}`,
        ...(index % 2 ? { tier: "pro" } : {}),
      }));
      await ask("v1/check", { checks });
      await page.waitForResponse((reply) => reply.url().endsWith("/metrics"));
    }
    await shoot(page, "live");
  },
  { address: WITH_TOKEN, colorScheme: "dark", ...DESKTOP },
);

await drive(
  async (page) => {
    await openTab(page, "Backtest");
    const line = (index) => {
      const at = new Date(1_700_000_000_000 + index * 1300 + (index % 7) * 90);
      const time = at
        .toISOString()
        .replace(
          /(\d+)-(\d+)-(\d+)T(.*)\..*/,
          (_, year, __, day, time) => `${day}/Nov/${year}:${time} +0000`,
        );
      const client = index % 5 < 2 ? "203.0.113.9" : `198.51.100.${(index * 7) % 200}`;
      return `${client} - - [${time}] "GET /${index % 13} HTTP/1.1" 200 512 "-" "-"`;
    };
    const log = Array.from({ length: 12_000 }, (_, index) => Math.floor(index + 900 * Math.sin(index / 900)))
      .sort((one, other) => one - other)
      .map(line)
      .join("\n");
    await page
      .locator("input[name=log]")
      .setInputFiles({ name: "access.log", mimeType: "text/plain", buffer: Buffer.from(`${log}\n`) });
    await page
      .locator("textarea[name=policies]")
      .fill("token_bucket 10/1m burst 20\nsliding_window_counter 15/1m\nfixed_window 1000/1h");
    await page.getByRole("button", { name: "Run" }).click();
    await page.locator(".results table").first().waitFor();
    await shoot(page, "backtest");
  },
  { address: WITH_TOKEN, viewport: { width: 1280, height: 1000 } },
);

await drive(
  async (page) => {
    await redrawn(page, () => page.locator("select[name=pattern]").selectOption("bursty"));
    await page.locator("#lanes .lane").first().scrollIntoViewIfNeeded();
    await page.locator("#playback").evaluate((bar) => bar.scrollIntoView());
    await shoot(page, "phone");
    await openTab(page, "Clients");
    await page.locator(".left", { hasText: "of 5" }).first().waitFor();
    await shoot(page, "phone-clients");
  },
  { address: WITH_TOKEN, colorScheme: "dark", ...PHONE },
);
