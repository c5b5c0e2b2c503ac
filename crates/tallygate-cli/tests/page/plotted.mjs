// Every lane plots exactly the numbers that `tallygate simulate --json` prints for the same scenario. Prints the scenarios
// and the plotted decisions, one per line; the test compares them with the library.

import { execFileSync } from "node:child_process";
import { assert, drive, drawn, plotted, url } from "./browser.mjs";

const ADDRESSES = [
  "#compare",
  "#compare?pattern=steady&limit=7&window_ms=3000&burst=3",
  "#compare?pattern=bursty&burst_size=12&rate_per_minute=200",
  "#compare?pattern=poisson&seed=99&cost=2",
  "#compare?pattern=ramp&rate_per_minute=300&duration_ms=60000",
  "#compare?pattern=retry&obeys=false&jitter=false&naive_wait_ms=150&rate_per_minute=120",
  "#compare?pattern=retry&jitter=false",
  "#compare?pattern=greedy&clients=4&greedy_factor=30",
];

/** Returns the options of the command for a scenario. */
function options({
  limit,
  window_ms,
  burst,
  algorithms,
  pattern,
  rate_per_minute,
  duration_ms,
  seed,
  cost,
  retry,
  clients,
  greedy_factor,
  burst_size,
  instances,
}) {
  const given = {
    limit,
    window: `${window_ms}ms`,
    burst,
    pattern,
    rate: `${rate_per_minute}/m`,
    duration: `${duration_ms}ms`,
    cost,
    instances,
  };
  // The command rejects flags that have no effect.
  const ofPattern = {
    poisson: { seed },
    bursty: { "burst-size": burst_size },
    greedy: { clients, "greedy-factor": greedy_factor },
    retry: {
      attempts: retry.attempts,
      ...(retry.obeys ? {} : { "naive-wait": `${retry.naive_wait_ms}ms` }),
    },
  };
  return [
    ...Object.entries({ ...given, ...ofPattern[pattern] }).flatMap(([name, value]) => [`--${name}`, String(value)]),
    ...algorithms.flatMap((name) => ["--algorithm", name]),
    ...(retry.obeys ? [] : ["--naive"]),
    ...(retry.jitter ? [] : ["--no-jitter"]),
  ];
}

await drive(async (page) => {
  for (const address of ADDRESSES) {
    await page.goto("about:blank");
    await page.goto(url + address);
    await drawn(page);
    const scenario = await page.evaluate(() => window.tallygate.scenario());
    const printed = execFileSync(process.env.TALLYGATE, ["simulate", "--json", ...options(scenario)], {
      maxBuffer: 1 << 28,
    });
    const expected = JSON.parse(printed);
    assert.deepEqual(expected.scenario, scenario);
    const lanes = await plotted(page);
    assert.deepEqual(
      lanes.map(({ algorithm }) => algorithm),
      expected.lanes.map(({ algorithm }) => algorithm),
    );
    assert.equal(lanes.length, 6);
    lanes.forEach((lane, index) => {
      const { events, clients, allowed, denied } = expected.lanes[index];
      const [{ state, cumulative, departures, worst_window }] = clients;
      const where = `${address}: ${lane.algorithm}`;
      assert.ok(events.at_us.length > 0, where);
      assert.deepEqual(
        lane.decisions,
        { at_us: events.at_us, value: events.allowed, client: events.client },
        where,
      );
      assert.deepEqual(lane.state, { at_us: state.at_us, value: state.value }, where);
      assert.deepEqual(lane.cumulative, cumulative, where);
      assert.deepEqual(lane.departures, departures, where);
      assert.deepEqual(lane.ideal, expected.ideal, where);
      assert.deepEqual(lane.offered, expected.offered[0], where);
      assert.deepEqual(lane.worst_window, worst_window, where);
      const number = (text) => Number(text.replaceAll(/\s/g, ""));
      assert.equal(number(lane.figures.allowed), allowed, where);
      assert.equal(number(lane.figures.denied), denied, where);
      assert.equal(number(lane.figures.worst.split("of")[0]), worst_window.count, where);
    });
    console.log(
      JSON.stringify({
        scenario,
        lanes: lanes.map(({ algorithm, decisions }) => ({ algorithm, ...decisions })),
      }),
    );
  }
});
