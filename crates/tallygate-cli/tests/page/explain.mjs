// A decision that is clicked, or walked to by keys, is explained by what the server says of it.

import { assert, ask, drive, openTab, plotted, url } from "./browser.mjs";

async function isExplained(page, algorithm, event) {
  await page.waitForFunction(
    ([algorithm, event]) => {
      const told = window.tallygate.explained();
      return told?.algorithm === algorithm && told.event === event;
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
        ["says", "formula"]
          .map((name) => item.querySelector(`.${name}`).textContent)
          .concat(item.querySelector("strong").textContent),
      ),
    );
  assert.ok(expected.steps.length >= 3);
  assert.deepEqual(
    shown,
    expected.steps.map(({ says, formula, value }) => [says, formula, value]),
  );
  const verdict = await page.locator(".verdict").textContent();
  assert.ok(verdict.endsWith(expected.decision.allowed ? ": allowed" : ": refused"), verdict);
  return expected;
}

await drive(async (page) => {
  const lanes = await plotted(page);
  for (const [place, lane] of lanes.entries()) {
    await openTab(page, "Compare");
    // By keys: to the sixth decision, and Enter.
    await page.locator("#lanes .strip").nth(place).focus();
    await page.keyboard.press("Home");
    for (let step = 0; step < 5; step += 1) await page.keyboard.press("ArrowRight");
    await page.keyboard.press("Enter");
    const told = await isExplained(page, lane.algorithm, 5);
    assert.equal(told.allowed, lane.decisions.value[5] === 1);
    assert.equal(told.at_us, lane.decisions.at_us[5]);
  }

  // By a click, on the place where it is drawn.
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

  // One to the other, another algorithm, and by the address.
  await page.getByRole("button", { name: "The decision before" }).click();
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

// Without a choice it is a refusal that is explained.
await drive(
  async (page) => {
    const [lane] = await plotted(page);
    const told = await isExplained(page, lane.algorithm, lane.decisions.value.indexOf(0));
    assert.equal(told.allowed, false);
  },
  { address: "#explain" },
);
