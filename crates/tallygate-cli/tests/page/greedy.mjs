// With several clients, the state and the curves are those of the chosen client.

import { assert, ask, drive, drawn, plotted } from "./browser.mjs";

await drive(
  async (page) => {
    const scenario = await page.evaluate(() => window.tallygate.scenario());
    const { lanes, offered, ideal } = await ask("v1/simulate", scenario);
    const shows = async (place) => {
      for (const [index, lane] of (await plotted(page)).entries()) {
        const client = lanes[index].clients[place];
        assert.equal(lane.client, client.name);
        assert.deepEqual(lane.state, { at_us: client.state.at_us, value: client.state.value });
        assert.deepEqual(lane.departures, client.departures);
        assert.deepEqual(lane.cumulative, client.cumulative);
        assert.deepEqual([lane.offered, lane.ideal], [offered[place], ideal]);
        assert.equal(lane.figures.worst, `${client.worst_window.count} of 10`);
      }
      // Only the greedy client has to wait, in the leaky bucket.
      const delays = await page.locator("#lanes .notes span", { hasText: "longest delay" }).allTextContents();
      assert.deepEqual(delays, place === 3 ? ["longest delay of greedy: 9 s"] : []);
      const name = lanes[0].clients[place].name;
      await page.locator(".lane").first().locator(".plot-name", { hasText: `tokens of ${name}` }).waitFor();
    };
    await shows(0);
    await page.getByLabel("State and curves of").selectOption("greedy");
    await shows(3);
    assert.match(page.url(), /client=3/);
    await page.reload();
    await drawn(page);
    await shows(3);
  },
  { address: "#compare?pattern=greedy" },
);

// The choice is hidden if there is one client.
await drive(async (page) => assert.equal(await page.getByLabel("State and curves of").isVisible(), false));
