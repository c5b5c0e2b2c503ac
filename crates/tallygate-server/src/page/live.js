// Live: what the running server does, once a second while this is seen.

import { Problem, get, getText, setToken, token } from "./api.js";
import { byId, make, newId, table, tell } from "./dom.js";
import { parse, quantile, select, sum } from "./metrics.js";
import { live } from "./plots.js";
import { count, measured, percent, rate } from "./units.js";

const EVERY_MS = 1000;
const SECONDS_KEPT = 120;
/** As many policies are drawn as can be told apart; the table has all. */
const MOST_DRAWN = 6;

export class Live {
  constructor() {
    this.readings = [];
    this.drawn = "";
    const tokenId = newId("token");
    this.token = make("input", {
      id: tokenId,
      type: "password",
      name: "token",
      value: token(),
      autocomplete: "off",
      spellcheck: false,
    });
    this.tiles = {};
    const tile = (name, label) => {
      this.tiles[name] = make("output", {}, "–");
      return make("div", { class: "tile" }, make("span", { class: "label" }, label), this.tiles[name]);
    };
    this.problem = make("p", { class: "problem", role: "alert", hidden: true });
    this.key = make("div", { class: "legend" });
    this.chart = make("div", { class: "plot" });
    this.policies = make("div", {});
    this.store = make("div", {});
    this.busiestClients = make("div", {});
    this.hot = make("div", {});
    this.hotProblem = make("p", { class: "about", role: "status" });
    byId("live").replaceChildren(
      this.problem,
      make(
        "div",
        { class: "tiles" },
        tile("decisions", "decisions a second"),
        tile("refused", "refused"),
        tile("p50", "latency, median"),
        tile("p99", "latency, 99 %"),
        tile("store", "store"),
        tile("keys", "clients kept"),
        tile("connections", "connections"),
      ),
      make(
        "section",
        { class: "box" },
        make("h2", {}, "Decisions a second, by policy and outcome"),
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
          make(
            "form",
            {
              class: "bar token",
              onsubmit: (event) => {
                event.preventDefault();
                setToken(this.token.value);
                this.isRefused = false;
                this.readHot();
              },
            },
            make("label", { for: tokenId }, "Admin token"),
            this.token,
            make("button", { type: "submit" }, "Use"),
          ),
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
      tell(this.problem, error.message);
    }
  }

  /** Asks for hot clients, until that is refused; then again when another token is given. */
  async readHot() {
    if (this.isRefused) return;
    try {
      const { most_refused: refused, busiest } = await get("v1/admin/hot");
      tell(this.hotProblem, "");
      const rows = (clients) =>
        clients.map((client) => [client.key, client.policy, `≈ ${count(client.count)}`]);
      this.hot.replaceChildren(
        table(
          "The most refused clients of the last minutes",
          ["client", "policy", "#refused"],
          rows(refused),
        ),
      );
      this.busiestClients.replaceChildren(
        table("The busiest clients", ["client", "policy", "#decisions"], rows(busiest)),
      );
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      this.isRefused = error.status === 401 || error.status === 403;
      this.hot.replaceChildren();
      this.busiestClients.replaceChildren();
      tell(this.hotProblem, `The most refused clients: ${error.message}.`);
    }
  }

  show() {
    const now = this.readings[this.readings.length - 1];
    const before = this.readings[this.readings.length - 2];
    const kept = select(now.samples, "tallygate_keys_live");
    tell(this.tiles.keys, kept.length ? count(sum(now.samples, "tallygate_keys_live")) : "–");
    tell(this.tiles.connections, count(sum(now.samples, "tallygate_connections")));
    const breaker = select(now.samples, "tallygate_store_breaker_open");
    tell(
      this.tiles.store,
      breaker.length === 0 ? "memory" : breaker[0].value ? "Redis, breaker open" : "Redis, breaker closed",
    );
    this.tiles.store.classList.toggle("over", breaker.length > 0 && breaker[0].value > 0);
    this.showPolicies(now);
    this.store.replaceChildren(
      ...(breaker.length === 0
        ? []
        : [
            table(
              "The store",
              ["counted", "#so far"],
              ["calls", "timeouts", "errors", "breaker_opened", "connections", "redirections"].map((name) => [
                name.replace("_", " "),
                count(sum(now.samples, `tallygate_store_${name}_total`)),
              ]),
            ),
          ]),
    );
    if (!before) return;
    const seconds = now.at - before.at;
    const each = (labels) =>
      (sum(now.samples, "tallygate_decisions_total", labels) -
        sum(before.samples, "tallygate_decisions_total", labels)) /
      seconds;
    tell(this.tiles.decisions, rate(each({})));
    tell(this.tiles.refused, percent(each({ outcome: "refused" }), each({})));
    for (const [name, part] of [
      ["p50", 0.5],
      ["p99", 0.99],
    ]) {
      // Of the last ten seconds: one alone may have too few requests to tell.
      const since = this.readings[Math.max(0, this.readings.length - 11)];
      const at = quantile(part, since.samples, now.samples, "tallygate_request_seconds", {});
      tell(this.tiles[name], at === null ? "–" : `≈ ${measured(at)}`);
    }
    this.draw(now);
  }

  showPolicies({ samples }) {
    const policies = [
      ...new Set(select(samples, "tallygate_decisions_total").map(({ labels }) => labels.policy)),
    ].sort();
    const total = (policy, outcome) => sum(samples, "tallygate_decisions_total", { policy, outcome });
    this.policies.replaceChildren(
      table(
        "Since the server started",
        ["policy", "#allowed", "#refused", "#share refused"],
        policies.map((policy) => {
          const [allowed, refused] = [total(policy, "allowed"), total(policy, "refused")];
          return [policy, count(allowed), count(refused), percent(refused, allowed + refused)];
        }),
      ),
    );
    this.busiest = policies
      .sort(
        (one, other) =>
          total(other, "allowed") + total(other, "refused") - total(one, "allowed") - total(one, "refused"),
      )
      .slice(0, MOST_DRAWN)
      .sort();
  }

  draw() {
    const series = this.busiest.flatMap((policy, hue) =>
      ["allowed", "refused"].map((outcome) => ({ policy, outcome, hue })),
    );
    const drawn = JSON.stringify(series);
    if (this.drawn !== drawn) {
      this.drawn = drawn;
      this.plot?.destroy();
      this.plot = live(this.chart, series);
      this.key.replaceChildren(
        ...series.map(({ policy, outcome, hue }) =>
          make(
            "span",
            {},
            make("span", { class: `key line hue-${hue}${outcome === "refused" ? " dashed" : ""}` }),
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
