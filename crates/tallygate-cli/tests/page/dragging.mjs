// Dragging a slider redraws the lanes within 100 ms, and the address stores the scenario.

import { assert, drive, drawn, plotted, redrawn } from "./browser.mjs";

const MAX_REDRAW_MS = 100;

await drive(async (page) => {
  const before = await plotted(page);
  const slider = page.locator("input[name=limit]");
  const box = await slider.boundingBox();
  const middle = box.y + box.height / 2;
  await page.mouse.move(box.x + box.width * 0.1, middle);
  await page.mouse.down();
  const times = [];
  for (let step = 2; step <= 20; step += 1) {
    await redrawn(page, () => page.mouse.move(box.x + (box.width * step) / 22, middle));
    times.push((await page.evaluate(() => window.tallygate.redraws())).at(-1));
  }
  await page.mouse.up();
  const limit = Number(await slider.inputValue());
  assert.ok(limit > 60, `dragged to ${limit}`);
  assert.equal(await page.locator("input[name=limit-exact]").inputValue(), String(limit));
  const after = await plotted(page);
  before.forEach((lane, index) =>
    assert.notDeepEqual(lane.cumulative, after[index].cumulative, lane.algorithm),
  );
  times.sort((one, other) => one - other);
  const shown = (ms) => ms.toFixed(1);
  console.log(`redraws in ms: median ${shown(times[times.length >> 1])}, longest ${shown(times.at(-1))}`);
  assert.ok(
    times[times.length >> 1] <= MAX_REDRAW_MS,
    `half of the redraws took longer than ${shown(times[times.length >> 1])} ms`,
  );

  // With the keyboard, by typing, and with another pattern.
  await slider.focus();
  await redrawn(page, () => page.keyboard.press("ArrowLeft"));
  assert.equal(await slider.inputValue(), String(limit - 1));
  await redrawn(page, () => page.locator("input[name=window_ms-exact]").fill("2.5"));
  await redrawn(page, () => page.locator("select[name=pattern]").selectOption("retry"));
  await redrawn(page, () => page.getByLabel("Respect Retry-After").uncheck());
  await redrawn(page, () => page.locator("input[name=naive_wait_ms-exact]").fill("300"));
  await page.waitForFunction(() => location.hash.includes("naive_wait_ms=300"));
  const query = new URLSearchParams(new URL(page.url()).hash.split("?")[1]);
  assert.deepEqual(Object.fromEntries(query), {
    pattern: "retry",
    limit: String(limit - 1),
    window_ms: "2500",
    obeys: "false",
    naive_wait_ms: "300",
  });

  const kept = await plotted(page);
  await page.reload();
  await drawn(page);
  assert.deepEqual(await plotted(page), kept);
  assert.equal(await page.locator("input[name=limit]").inputValue(), String(limit - 1));
  assert.equal(await page.getByLabel("Respect Retry-After").isChecked(), false);
});
