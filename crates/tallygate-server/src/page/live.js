// Live: the metrics of the running server, read once per second while this tab is visible.

import { Problem, get, getText, token } from "./api.js";
import { byId, make, table, setText } from "./dom.js";
import { parse, quantile, select, sum } from "./metrics.js";
import { live } from "./plots.js";
import { tokenForm, tokenHelps } from "./token.js";
import { count, measured, percent, rate } from "./units.js";

const EVERY_MS = 1000;
const SECONDS_KEPT = 120;
/** The most policies in the plot, so that their colors differ. The table has all. */
const MOST_DRAWN = 6;

/** The requests that shadow limits would have denied, which only servers with shadow limits report. */
const SHADOW_DENIALS = "tallygate_shadow_denials_total";

export class Live {
  constructor() {
    this.readings = [];
    this.drawn = "";
    this.problem = make("p", { class: "problem", role: "alert", hidden: true });
    this.tiles = {};
    const tile = (name, label) => {
      this.tiles[name] = make("output", {}, "–");
      return make("div", { class: "tile" }, make("span", { class: "label" }, label), this.tiles[name]);
    };
    this.key = make("div", { class: "legend" });
    this.chart = make("div", { class: "plot" });
    this.policies = make("div", {});
    this.store = make("div", {});
    this.busiestClients = make("div", {});
    this.hot = make("div", {});
    this.hotProblem = make("p", { class: "about", role: "status" });
    this.tokenForm = tokenForm(() => {
      this.isDenied = false;
      this.readHot();
    });
    byId("live").replaceChildren(
      this.problem,
      make(
        "div",
        { class: "tiles" },
        tile("decisions", "decisions per second"),
        tile("denied", "denied"),
        tile("p50", "median latency"),
        tile("p99", "99th percentile latency"),
        tile("store", "store"),
        tile("keys", "keys in memory"),
        tile("connections", "open connections"),
      ),
      make(
        "section",
        { class: "box" },
        make("h2", {}, "Decisions per second, by policy and outcome"),
        this.key,
        this.chart,
      ),
      make(
        "div",
        { class: "columns" },
        make("section", { class: "box" }, this.policies, this.store, this.busiestClients),
        make(
          "section",
          { class: "box" },
          this.tokenForm,
          this.hotProblem,
          this.hot,
        ),
      ),
    );
    new ResizeObserver(
      () =>
        this.plot &&
        this.chart.clientWidth > 0 &&
        this.plot.setSize({ width: this.chart.clientWidth, height: 220 }),
    ).observe(this.chart);
  }

  shown() {
    this.isVisible = true;
    // The user may have entered a token in another tab of the page.
    this.isDenied = false;
    this.turn();
  }

  hidden() {
    this.isVisible = false;
    clearTimeout(this.timer);
  }

  redraw() {
    this.plot?.redraw(false, true);
  }

  async turn() {
    clearTimeout(this.timer);
    if (document.visibilityState === "visible") await Promise.all([this.read(), this.readHot()]);
    if (this.isVisible) this.timer = setTimeout(() => this.turn(), EVERY_MS);
  }

  async read() {
    try {
      const samples = parse(await getText("metrics"));
      this.problem.hidden = true;
      this.readings.push({ at: Date.now() / 1000, samples });
      while (this.readings.length > SECONDS_KEPT) this.readings.shift();
      this.show();
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      this.problem.hidden = false;
      setText(this.problem, error.message);
    }
  }

  /** Reads the busiest and most denied clients. After a 401 or 403, waits until the user enters another token. */
  async readHot() {
    if (this.isDenied) return;
    try {
      const { most_denied: denied, busiest } = await get("v1/admin/hot");
      setText(this.hotProblem, "");
      this.tokenForm.hidden = true;
      const rows = (clients) =>
        clients.map(({ key, policy, count: times, error }) => [
          key,
          policy,
          error > 0 ? `${count(times)} ± ${count(error)}` : count(times),
        ]);
      this.hot.replaceChildren(
        table(
          "Most denied clients of the last minutes",
          ["client", "policy", "#denied"],
          rows(denied),
        ),
      );
      this.busiestClients.replaceChildren(
        table("Busiest clients of the last minutes", ["client", "policy", "#decisions"], rows(busiest)),
      );
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      this.isDenied = error.status === 401 || error.status === 403;
      this.tokenForm.hidden = !tokenHelps(error.status);
      this.hot.replaceChildren();
      this.busiestClients.replaceChildren();
      setText(
        this.hotProblem,
        error.status === 401 && !token()
          ? "The lists of the busiest and the most denied clients need an admin token. A server without a configuration file " +
              "prints one when it starts, and a link that contains it."
          : `Cannot list the busiest and the most denied clients: ${error.message}.`,
      );
    }
  }

  show() {
    const now = this.readings[this.readings.length - 1];
    const before = this.readings[this.readings.length - 2];
    const kept = select(now.samples, "tallygate_keys_kept");
    setText(this.tiles.keys, kept.length ? count(sum(now.samples, "tallygate_keys_kept")) : "–");
    setText(this.tiles.connections, count(sum(now.samples, "tallygate_connections")));
    const breaker = select(now.samples, "tallygate_store_breaker_open");
    setText(
      this.tiles.store,
      breaker.length === 0 ? "memory" : breaker[0].value ? "Redis, unavailable" : "Redis, available",
    );
    this.tiles.store.classList.toggle("over", breaker.length > 0 && breaker[0].value > 0);
    this.showPolicies(now);
    this.store.replaceChildren(
      ...(breaker.length === 0
        ? []
        : [
            table(
              "Store",
              ["counter", "#since startup"],
              ["calls", "timeouts", "errors", "breaker_opened", "connections", "redirections"].map((name) => [
                name.replace("_", " "),
                count(sum(now.samples, `tallygate_store_${name}_total`)),
              ]),
            ),
          ]),
    );
    this.draw();
    if (!before) return;
    const seconds = now.at - before.at;
    const each = (labels) =>
      (sum(now.samples, "tallygate_decisions_total", labels) -
        sum(before.samples, "tallygate_decisions_total", labels)) /
      seconds;
    setText(this.tiles.decisions, rate(each({})));
    setText(this.tiles.denied, percent(each({ outcome: "denied" }), each({})));
    for (const [name, part] of [
      ["p50", 0.5],
      ["p99", 0.99],
    ]) {
      // Over the last ten seconds, because a single second may have too few requests.
      const since = this.readings[Math.max(0, this.readings.length - 11)];
      const at = quantile(part, since.samples, now.samples, "tallygate_request_seconds", {});
      setText(this.tiles[name], at === null ? "–" : `≈ ${measured(at)}`);
    }
  }

  showPolicies({ samples }) {
    const policies = [
      ...new Set(select(samples, "tallygate_decisions_total").map(({ labels }) => labels.policy)),
    ].sort();
    const total = (policy, outcome) => sum(samples, "tallygate_decisions_total", { policy, outcome });
    const shadows = select(samples, SHADOW_DENIALS);
    const shadow = (policy) =>
      shadows.some(({ labels }) => labels.policy === policy) ? count(sum(shadows, SHADOW_DENIALS, { policy })) : null;
    // A phone has no room for the fifth column.
    this.policies.classList.toggle("stacked", shadows.length > 0);
    this.policies.replaceChildren(
      table(
        "Since the server started",
        ["policy", "#allowed", "#denied", "#share denied", ...(shadows.length ? ["#denied by shadow limits"] : [])],
        policies.map((policy) => {
          const [allowed, denied] = [total(policy, "allowed"), total(policy, "denied")];
          return [
            policy,
            count(allowed),
            count(denied),
            percent(denied, allowed + denied),
            ...(shadows.length ? [shadow(policy)] : []),
          ];
        }),
      ),
    );
    this.busiest = policies
      .sort(
        (one, other) =>
          total(other, "allowed") + total(other, "denied") - total(one, "allowed") - total(one, "denied"),
      )
      .slice(0, MOST_DRAWN)
      .sort();
  }

  draw() {
    const series = this.busiest.flatMap((policy, hue) =>
      ["allowed", "denied"].map((outcome) => ({ policy, outcome, hue })),
    );
    const drawn = JSON.stringify(series);
    if (this.drawn !== drawn) {
      this.drawn = drawn;
      this.plot?.destroy();
      this.plot = live(this.chart, series, SECONDS_KEPT);
      this.key.replaceChildren(
        ...series.map(({ policy, outcome, hue }) =>
          make(
            "span",
            {},
            make("span", { class: `key line hue-${hue}${outcome === "denied" ? " dashed" : ""}` }),
            `${policy}, ${outcome}`,
          ),
        ),
      );
    }
    const pairs = this.readings.slice(1).map((now, index) => [this.readings[index], now]);
    this.plot.setData([
      pairs.map(([, now]) => now.at),
      ...series.map(({ policy, outcome }) =>
        pairs.map(
          ([before, now]) =>
            (sum(now.samples, "tallygate_decisions_total", { policy, outcome }) -
              sum(before.samples, "tallygate_decisions_total", { policy, outcome })) /
            (now.at - before.at),
        ),
      ),
    ]);
  }
}
