// Drives the page in Chromium. A case fails on an error, a violation of the content security policy, or a request to
// another server.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import path from "node:path";

const require = createRequire(path.resolve(process.env.TALLYGATE_BROWSER, "package.json"));
const { chromium } = require("playwright-core");

const FLAGS = [
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];
const PATIENCE_MS = 20_000;

export const url = process.argv[2];
export { assert };

/** Starts a browser with a separate profile in a temporary directory, and closes it at the end. */
export async function open(run) {
  const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: FLAGS });
  try {
    await run(browser);
  } finally {
    await browser.close();
  }
}

/**
 * Opens the page, runs a case, and fails on unexpected errors or requests. `expected` lists console errors that must occur;
 * `mayFail` matches requests that may end without a reply.
 */
export async function drive(run, { address = "", expected = [], mayFail = /^$/, ...options } = {}) {
  const wrong = [];
  const came = [];
  await open(async (browser) => {
    const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
    context.setDefaultTimeout(PATIENCE_MS);
    const page = await context.newPage();
    page.on("pageerror", (error) => wrong.push(`page error: ${error.stack}`));
    page.on("dialog", (dialog) => {
      wrong.push(`dialog: ${dialog.message()}`);
      dialog.dismiss();
    });
    page.on("console", (message) => {
      if (message.type() !== "error" && message.type() !== "warning") return;
      const text = `${message.text()} (${message.location().url})`;
      (expected.some((known) => known.test(text)) ? came : wrong).push(text);
    });
    page.on("request", (request) => {
      const { protocol, origin } = new URL(request.url());
      if (protocol !== "data:" && origin !== new URL(url).origin) wrong.push(`a request to ${request.url()}`);
    });
    page.on("requestfailed", (request) => {
      if (!mayFail.test(request.url())) wrong.push(`${request.url()}: ${request.failure().errorText}`);
    });
    await page.goto(url + address);
    await drawn(page);
    await run(page);
  });
  assert.deepEqual(wrong, []);
  for (const known of expected)
    assert.ok(
      came.some((text) => known.test(text)),
      `no console error is like ${known}`,
    );
}

/** Waits until the lanes were drawn. */
export const drawn = (page) => page.waitForFunction(() => window.tallygate?.redraws().length > 0);

/** Does something that changes the scenario, and waits until it is drawn. */
export async function redrawn(page, change) {
  const before = await page.evaluate(() => window.tallygate.redraws().length);
  await change();
  await page.waitForFunction((before) => window.tallygate.redraws().length > before, before);
}

export const plotted = (page) => page.evaluate(() => window.tallygate.plotted());

export const openTab = (page, name) => page.getByRole("tab", { name }).click();

export async function ask(path, body) {
  const reply = await fetch(new URL(path, url), { method: "POST", body: JSON.stringify(body) });
  assert.equal(reply.status, 200, await reply.clone().text());
  return reply.json();
}
