// Playback runs, pauses and steps from decision to decision; the counts are those up to that time.

import { assert, drive, plotted } from "./browser.mjs";

const counted = async (page) => {
  const [lane] = await plotted(page);
  return Number(lane.figures.allowed) + Number(lane.figures.denied);
};
const seconds = async (page) => parseFloat(await page.locator(".playback .time").textContent());

await drive(async (page) => {
  const [lane] = await plotted(page);
  const all = lane.decisions.at_us.length;
  assert.equal(await counted(page), all);

  await page.locator("select[name=speed]").selectOption("5");
  await page.getByRole("button", { name: "Play" }).click();
  await page.waitForFunction(() => parseFloat(document.querySelector(".playback .time").textContent) > 1);
  await page.getByRole("button", { name: "Pause" }).click();
  const at = await seconds(page);
  const until = (us) => lane.decisions.at_us.filter((at) => at <= us).length;
  assert.ok(at < 30 && (await counted(page)) < all, `at ${at} s`);
  assert.equal(await counted(page), until(at * 1e6 + 500));
  // The future is covered up to the end of the plot.
  const { veil, over } = await page.evaluate(() => {
    const plot = document.querySelector(".timeline .plot");
    const box = (element) => element.getBoundingClientRect().toJSON();
    return { veil: box(plot.querySelector(".veil")), over: box(plot.querySelector(".u-over")) };
  });
  assert.ok(Math.abs(veil.right - over.right) < 2, `${veil.right} is not ${over.right}`);
  assert.ok(Math.abs((veil.left - over.left) / over.width - at / 30) < 0.01, `${veil.left} for ${at} s`);

  await page.locator(".playback input[name=time]").fill("0");
  assert.equal(await counted(page), until(0));
  const instants = [...new Set((await plotted(page)).flatMap(({ decisions }) => decisions.at_us))].sort(
    (one, other) => one - other,
  );
  for (const instant of instants.filter((at) => at > 0).slice(0, 4)) {
    await page.getByRole("button", { name: "Next decision" }).click();
    assert.equal(await seconds(page), Number((instant / 1e6).toFixed(3)));
    assert.equal(await counted(page), until(instant));
  }
  await page.getByRole("button", { name: "Previous decision" }).click();
  assert.equal(await seconds(page), Number((instants.filter((at) => at > 0)[2] / 1e6).toFixed(3)));

  // Playback stops at the end.
  await page.locator("select[name=speed]").selectOption("50");
  await page.getByRole("button", { name: "Play" }).click();
  await page.getByRole("button", { name: "Play" }).waitFor();
  assert.equal(await seconds(page), 30);
  assert.equal(await counted(page), all);
});
