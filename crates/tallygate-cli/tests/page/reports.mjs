// The HTML reports of simulate and backtest fit a phone in both themes: only the tables of simulate and the plots scroll,
// each in its own box, and no number, heading, address or algorithm of a table is broken.

import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import os from "node:os";
import path from "node:path";
import { pathToFileURL } from "node:url";
import { assert, open } from "./browser.mjs";

const WIDTH = 390;
const LONG = "n".repeat(120);
const directory = mkdtempSync(path.join(os.tmpdir(), "tallygate-reports-"));
const file = (name) => path.join(directory, name);

/** Runs a command that writes a report, and returns its path. */
function report(name, command, ...options) {
  execFileSync(process.env.TALLYGATE, [command, ...options, "--html", file(name)]);
  return file(name);
}

try {
  const ip = (index) => (index % 2 ? "192.0.2.1" : "2001:db8:1234:5678::9");
  const line = (index) =>
    JSON.stringify({ time: 1_700_000_000 + index, user: index % 2 ? LONG : "bob", ip: ip(index) });
  writeFileSync(file("log"), `${Array.from({ length: 3000 }, (_, index) => line(index)).join("\n")}\n${LONG}\n`);
  writeFileSync(file("policies.toml"), `[policies.${LONG}]\nlimit = 2\nwindow = "1m"\n`);
  const options = ["--policy", "gcra 9/1m", "--policy", "sliding_window_counter 7/1m, fixed_window 99/1h"];
  const reports = [
    report("address.html", "backtest", file("log"), ...options, "--suggest", "99"),
    report("names.html", "backtest", file("log"), "--config", file("policies.toml"), "--key", "field:user"),
    ...["steady", "greedy", "retry"].map((pattern) => report(`${pattern}.html`, "simulate", "--pattern", pattern)),
    report("divided.html", "simulate", "--instances", "3"),
  ];
  await open(async (browser) => {
    for (const colorScheme of ["light", "dark"]) {
      const viewport = { width: WIDTH, height: 844 };
      const context = await browser.newContext({ viewport, colorScheme, hasTouch: true, isMobile: true });
      const page = await context.newPage();
      for (const shown of reports) {
        await page.goto(pathToFileURL(shown).href);
        const { wide, outside, broken, split } = await page.evaluate(() => ({
          wide: document.documentElement.scrollWidth,
          outside: [...document.querySelectorAll("body *")]
            .filter((element) => !element.closest(".wide") && element.getBoundingClientRect().right > innerWidth + 1)
            .map((element) => element.outerHTML.slice(0, 80)),
          broken: [...document.querySelectorAll("td:not(.name)")]
            .filter((cell) => cell.getBoundingClientRect().height > 3 * Number.parseFloat(getComputedStyle(cell).fontSize))
            .filter((cell) => cell.parentElement.querySelector(".name") === null)
            .map((cell) => cell.textContent),
          // The words of names, which are addresses and algorithms, that are on two lines.
          split: [...document.querySelectorAll("td.name")].flatMap((cell) => {
            const text = cell.lastChild;
            return [...text.data.matchAll(/\S+/g)]
              .filter(({ index, 0: word }) => {
                const range = new Range();
                range.setStart(text, index);
                range.setEnd(text, index + word.length);
                return word.length < 50 && range.getClientRects().length > 1;
              })
              .map(([word]) => word);
          }),
        }));
        assert.ok(wide <= WIDTH, `${shown} is ${wide} wide`);
        // Every cell of a backtest is visible without scrolling, with its label.
        const [cells, hidden] = await page.locator("[data-label]").evaluateAll((cells) => [
          cells.length,
          cells
            .filter((cell) => cell.getBoundingClientRect().right > innerWidth)
            .concat(cells.filter((cell) => getComputedStyle(cell, "::before").content !== `"${cell.dataset.label}"`))
            .map((cell) => cell.outerHTML),
        ]);
        assert.deepEqual(hidden, [], shown);
        assert.equal(cells > 0, /address|names/.test(path.basename(shown)), shown);
        assert.deepEqual(outside, [], shown);
        assert.deepEqual(broken, [], shown);
        assert.deepEqual(split, [], shown);
      }
      await context.close();
    }
  });
} finally {
  rmSync(directory, { recursive: true });
}
