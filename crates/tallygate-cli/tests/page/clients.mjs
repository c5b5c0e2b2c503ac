// Real decisions: a request charges only the client that sent it.

import { assert, ask, drive, openTab } from "./browser.mjs";

const card = (page, place) => page.locator(".card").nth(place);
const left = (page, place) => card(page, place).locator(".left");
const says = (locator, text) => locator.filter({ hasText: text }).waitFor();
const remaining = async (key, more = {}) =>
  (await ask("v1/peek", { policy: "api", key, cost: 0, ...more })).remaining;

await drive(async (page) => {
  await openTab(page, "Clients");
  await page.locator("select[name=policy]").selectOption("api");
  await says(left(page, 0), "5 of 5");
  assert.equal(await page.locator(".reply pre").isVisible(), false);
  await card(page, 0).getByRole("button", { name: "Send 1", exact: true }).click();
  await says(left(page, 0), "4 of 5");
  assert.equal(await remaining("alice"), 4);

  // The reply is shown unchanged.
  const body = JSON.parse(await page.locator(".reply code").textContent());
  assert.deepEqual([body.allowed, body.policy, body.limit, body.remaining], [true, "api", 5, 4]);
  const fields = Object.fromEntries(
    await page
      .locator(".header-fields")
      .evaluate((list) =>
        [...list.querySelectorAll("dt")].map((name) => [name.textContent, name.nextSibling.textContent]),
      ),
  );
  assert.equal(fields["x-ratelimit-remaining"], "4");
  assert.match(fields.ratelimit, /^"api";r=4/);
  assert.equal(fields["content-type"], "application/json");

  // Ten requests are sent one after the other, so that the decisions are shown in their order.
  let [pending, mostPending] = [0, 0];
  await page.route("**/v1/check*", async (route) => {
    pending += 1;
    mostPending = Math.max(mostPending, pending);
    const response = await route.fetch();
    pending -= 1;
    await route.fulfill({ response });
  });
  await card(page, 0).getByRole("button", { name: "Send 10" }).click();
  await says(card(page, 0).locator(".counts"), "5 allowed, 6 denied");
  assert.equal(mostPending, 1);
  await page.unroute("**/v1/check*");
  const shown = await card(page, 0)
    .locator(".history li")
    .evaluateAll((marks) => marks.map(({ title }) => title));
  assert.deepEqual(shown, [...Array(5).fill("allowed"), ...Array(6).fill("denied")]);
  await says(left(page, 0), "0 of 5");
  await says(card(page, 0).locator(".message"), "retry after");
  assert.equal(await card(page, 0).locator(".history .denied").count(), 6);
  for (const [place, key] of [
    [1, "bob"],
    [2, "carol"],
  ]) {
    assert.equal(await left(page, place).textContent(), "5 of 5");
    assert.equal(await remaining(key), 5);
  }

  // A button sends requests while it is held by pointer or keyboard.
  const hold = card(page, 1).getByRole("button", { name: "Hold" });
  const box = await hold.boundingBox();
  await page.mouse.move(box.x + 5, box.y + 5);
  await page.mouse.down();
  await says(card(page, 1).locator(".counts"), /5 allowed, [2-9]/);
  await page.mouse.up();
  await hold.focus();
  const before = await card(page, 1).locator(".history li").count();
  await page.keyboard.down("Space");
  await page.waitForFunction(
    (before) => document.querySelectorAll(".card")[1].querySelectorAll(".history li").length > before + 2,
    before,
  );
  await page.keyboard.up("Space");
  assert.equal(await remaining("carol"), 5);
  assert.equal(await left(page, 2).textContent(), "5 of 5");

  // Another client, a tier, a cost and a custom name.
  await page.locator("input[name=new-client]").fill("dave");
  await page.keyboard.press("Enter");
  await page.locator("select[name=tier]").selectOption("pro");
  await page.locator("#clients input[name=cost]").fill("7");
  await says(left(page, 3), "50 of 50");
  await card(page, 3).getByRole("button", { name: "Send 1", exact: true }).click();
  await says(left(page, 3), "43 of 50");
  await card(page, 3).locator(".client-name").fill("erin");
  await says(left(page, 3), "50 of 50");
  assert.equal(await remaining("dave", { tier: "pro" }), 43);

  // A cost of 0 is sent as 0, and charges nothing.
  await page.locator("#clients input[name=cost]").fill("0");
  const [sent] = await Promise.all([
    page.waitForRequest((request) => request.url().includes("/v1/check")),
    card(page, 3).getByRole("button", { name: "Send 1", exact: true }).click(),
  ]);
  assert.equal(sent.postDataJSON().cost, 0);
  assert.equal(await remaining("erin", { tier: "pro" }), 50);

  // After a denial, the page counts down to the retry time and then says that a retry can succeed.
  await page.locator("select[name=policy]").selectOption("brief");
  await page.locator("#clients input[name=cost]").fill("1");
  await card(page, 2).getByRole("button", { name: "Send 10" }).click();
  await says(card(page, 2).locator(".message"), /^Denied.*: retry after \d\.\d s\.$/);
  await says(card(page, 2).locator(".message"), /^Denied.*\. A retry can succeed now\.$/);

  // The page does not advise a blocked client to choose a smaller cost.
  await page.locator("select[name=policy]").selectOption("api");
  await card(page, 1).locator(".client-name").fill("mallory");
  await card(page, 1).getByRole("button", { name: "Send 1", exact: true }).click();
  await says(card(page, 1).locator(".message"), "Denied: the client is blocked, so no wait helps.");

  // A hidden tab sends no requests.
  await openTab(page, "Compare");
  const requests = [];
  // The browser fetches the icon at any time.
  page.on("request", (request) => request.url().includes("/v1/") && requests.push(request.url()));
  await page.locator("input[name=seed]").focus();
  for (let step = 0; step < 5; step += 1) {
    const count = await page.evaluate(() => window.tallygate.redraws().length);
    await page.keyboard.press("ArrowRight");
    await page.waitForFunction((count) => window.tallygate.redraws().length > count, count);
  }
  assert.ok(requests.length >= 5 && requests.every((url) => url.endsWith("/v1/simulate")), `${requests}`);
});
