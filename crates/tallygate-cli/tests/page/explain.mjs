// A decision that is selected by click or keyboard is explained with the server's arithmetic.

import { assert, ask, drive, openTab, plotted, url } from "./browser.mjs";

async function isExplained(page, algorithm, event) {
  await page.waitForFunction(
    ([algorithm, event]) => {
      const explanation = window.tallygate.explained();
      return explanation?.algorithm === algorithm && explanation.event === event;
    },
    [algorithm, event],
  );
  const scenario = await page.evaluate(() => window.tallygate.scenario());
  const expected = await ask("v1/explain", { scenario, algorithm, event });
  assert.deepEqual(await page.evaluate(() => window.tallygate.explained()), expected);
  const shown = await page
    .locator(".steps-of li")
    .evaluateAll((items) =>
      items.map((item) =>
        ["description", "formula"]
          .map((name) => item.querySelector(`.${name}`).textContent)
          .concat(item.querySelector("strong").textContent),
      ),
    );
  assert.ok(expected.steps.length >= 3);
  assert.deepEqual(
    shown,
    expected.steps.map(({ name, description, formula, value }) => [
      description,
      formula === name ? "read from the state" : formula,
      value,
    ]),
  );
  // The symbols that the formulas use are explained, with their values and units.
  const symbols = await page
    .locator(".symbols tbody tr")
    .evaluateAll((rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent)));
  assert.deepEqual(
    symbols,
    expected.symbols.map(({ symbol, meaning, value }) => [symbol, meaning, value]),
  );
  assert.ok(symbols.some(([symbol, , value]) => symbol === "W" && value === "10000000 µs"));
  assert.ok(
    symbols.every(([, , value]) => /^-?\d+( µs)?$/.test(value)),
    JSON.stringify(symbols),
  );
  const verdict = await page.locator(".verdict").textContent();
  assert.ok(verdict.endsWith(expected.decision.allowed ? ": allowed" : ": denied"), verdict);
  return expected;
}

await drive(async (page) => {
  const lanes = await plotted(page);
  for (const [place, lane] of lanes.entries()) {
    await openTab(page, "Compare");
    // With the keyboard: the sixth decision, then Enter.
    await page.locator("#lanes .strip").nth(place).focus();
    await page.keyboard.press("Home");
    for (let step = 0; step < 5; step += 1) await page.keyboard.press("ArrowRight");
    await page.keyboard.press("Enter");
    const explanation = await isExplained(page, lane.algorithm, 5);
    assert.equal(explanation.allowed, lane.decisions.value[5] === 1);
    assert.equal(explanation.at_us, lane.decisions.at_us[5]);
  }

  // With a click on the drawn decision.
  await openTab(page, "Compare");
  const [lane] = lanes;
  const wanted = lane.decisions.at_us.length - 1;
  const box = await page.locator("#lanes .strip .u-over").first().boundingBox();
  const { duration_ms: duration } = await page.evaluate(() => window.tallygate.scenario());
  await page.mouse.click(
    box.x + (box.width * lane.decisions.at_us[wanted]) / (duration * 1000),
    box.y + box.height / 2,
  );
  await isExplained(page, lane.algorithm, wanted);

  // The next decision, another algorithm, and the address.
  await page.getByRole("button", { name: "Previous decision" }).click();
  await isExplained(page, lane.algorithm, wanted - 1);
  await page.locator("select[name=algorithm]").selectOption("fixed_window");
  await isExplained(page, "fixed_window", wanted - 1);
  await page.locator("input[name=event]").fill("3");
  await isExplained(page, "fixed_window", 2);
  await page.waitForFunction(() => location.hash.includes("event=2"));
  const address = page.url();
  await page.goto("about:blank");
  await page.goto(address);
  await isExplained(page, "fixed_window", 2);
  assert.ok(address.startsWith(`${url}#explain?`), address);
});

// Without a selection, the first denial is explained.
await drive(
  async (page) => {
    const [lane] = await plotted(page);
    const explanation = await isExplained(page, lane.algorithm, lane.decisions.value.indexOf(0));
    assert.equal(explanation.allowed, false);
  },
  { address: "#explain" },
);
