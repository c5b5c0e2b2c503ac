// Explain: the arithmetic of a decision, as the core computed it.

import { Problem, post } from "./api.js";
import { byId, make, newId, table, setText } from "./dom.js";
import { Lane } from "./lanes.js";
import { algorithmName, clock, count, span } from "./units.js";

export class Explain {
  /** @param addressed called when the address changes */
  constructor(addressed) {
    this.addressed = addressed;
    this.asked = 0;
    this.isVisible = false;
    this.algorithm = null;
    this.event = null;
    const algorithmId = newId("algorithm");
    const eventId = newId("event");
    this.algorithms = make("select", {
      id: algorithmId,
      name: "algorithm",
      onchange: () => this.choose(this.algorithms.value, this.event),
    });
    this.number = make("input", {
      id: eventId,
      type: "number",
      name: "event",
      min: 1,
      step: 1,
      oninput: () =>
        this.number.validity.valid &&
        this.number.value &&
        this.choose(this.algorithm, Number(this.number.value) - 1),
    });
    this.of = make("span", { class: "unit" });
    const walk = (label, sign, by) =>
      make(
        "button",
        {
          type: "button",
          "aria-label": label,
          title: label,
          onclick: () => this.choose(this.algorithm, this.event + by),
        },
        sign,
      );
    this.lane = new Lane((algorithm, event) => this.choose(algorithm, event));
    this.verdict = make("h2", { tabIndex: -1 });
    this.problem = make("p", { class: "problem", role: "alert", hidden: true });
    this.steps = make("ol", { class: "steps-of" });
    this.facts = make("div", { class: "facts" });
    this.symbols = make("div", { class: "facts symbols" });
    byId("explain").replaceChildren(
      make(
        "div",
        { class: "bar chooser" },
        make("label", { for: algorithmId }, "Algorithm"),
        this.algorithms,
        make("label", { for: eventId }, "Decision"),
        walk("Previous decision", "‹", -1),
        this.number,
        walk("Next decision", "›", 1),
        this.of,
        make(
          "a",
          {
            class: "back",
            href: "#compare",
            onclick: (event) => {
              event.preventDefault();
              byId("tab-compare").click();
            },
          },
          "Back to Compare",
        ),
      ),
      this.lane.element,
      this.problem,
      this.verdict,
      make("div", { class: "columns" }, this.steps, make("div", { class: "side" }, this.facts, this.symbols)),
    );
    new ResizeObserver(() => this.lane.lane && this.lane.resize()).observe(byId("explain"));
  }

  /** Sets the simulation whose decisions are explained. */
  take(reply) {
    this.reply = reply;
    this.algorithms.replaceChildren(
      ...reply.lanes.map(({ algorithm }) => make("option", { value: algorithm }, algorithmName(algorithm))),
    );
    if (this.isVisible) this.choose(this.algorithm, this.event);
  }

  /** Reads the decision from an address. */
  address(query) {
    const given = new URLSearchParams(query);
    if (given.has("algorithm")) this.algorithm = given.get("algorithm");
    if (/^\d{1,6}$/.test(given.get("event") ?? "")) this.event = Number(given.get("event"));
  }

  query() {
    return this.algorithm === null || this.event === null
      ? ""
      : `algorithm=${this.algorithm}&event=${this.event}`;
  }

  shown() {
    this.isVisible = true;
    if (this.reply) this.choose(this.algorithm, this.event);
  }

  hidden() {
    this.isVisible = false;
  }

  redraw() {
    if (this.lane.lane) this.lane.redraw();
  }

  /** Explains a decision. If `event` is null, explains the first denial. */
  choose(algorithm, event) {
    const lane = this.reply.lanes.find((lane) => lane.algorithm === algorithm) ?? this.reply.lanes[0];
    const decisions = lane.events.at_us.length;
    this.algorithm = lane.algorithm;
    this.event =
      event === null
        ? Math.max(0, lane.events.allowed.indexOf(0))
        : Math.max(0, Math.min(event, decisions - 1));
    if (!this.isVisible) return;
    this.algorithms.value = this.algorithm;
    if (Number(this.number.value) !== this.event + 1) this.number.value = this.event + 1;
    this.number.max = Math.max(1, decisions);
    setText(this.of, `of ${count(decisions)}`);
    this.lane.show(lane, this.reply, lane.events.client[this.event]);
    this.lane.select(this.event);
    this.addressed();
    this.ask();
  }

  async ask() {
    const turn = ++this.asked;
    const question = { scenario: this.reply.scenario, algorithm: this.algorithm, event: this.event };
    try {
      const explanation = await post("v1/explain", question);
      if (turn === this.asked) this.show(explanation);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      if (turn !== this.asked) return;
      this.problem.hidden = false;
      setText(this.problem, error.message);
      for (const part of [this.verdict, this.steps, this.facts, this.symbols]) part.replaceChildren();
    }
  }

  show(explanation) {
    this.problem.hidden = true;
    this.explanation = explanation;
    const { decision, at_us, client, instance } = explanation;
    const lane = this.reply.lanes.find((lane) => lane.algorithm === explanation.algorithm);
    const who = lane.clients.length > 1 ? ` by ${lane.clients[client].name}` : "";
    const where = lane.division ? ` on instance ${instance + 1}` : "";
    setText(this.verdict, `At ${clock(at_us)}${who}${where}: ${decision.allowed ? "allowed" : "denied"}`);
    this.verdict.className = decision.allowed ? "verdict allowed" : "verdict denied";
    this.steps.replaceChildren(
      ...explanation.steps.map((step) =>
        make(
          "li",
          {},
          make("span", { class: "description" }, step.description),
          make("code", { class: "step-name" }, `${step.name} =`),
          make("code", { class: "formula" }, step.formula === step.name ? "read from the state" : step.formula),
          make("strong", {}, step.value),
        ),
      ),
    );
    const never = decision.allowed ? "–" : "never";
    this.facts.replaceChildren(
      table(
        "Fields of the decision",
        ["field", "#value"],
        [
          ["limit", count(decision.limit)],
          ["remaining", count(decision.remaining)],
          ["retry after", decision.retry_after_us === null ? never : span(decision.retry_after_us)],
          ["reset after", span(decision.reset_after_us)],
          ["delay", span(decision.delay_us)],
        ],
      ),
    );
    this.symbols.replaceChildren(
      table(
        "Symbols",
        ["symbol", "meaning", "#value"],
        explanation.symbols.map(({ symbol, meaning, value }) => [make("code", {}, symbol), meaning, value]),
      ),
      make(
        "p",
        { class: "about" },
        "Times are in microseconds since the start. The arithmetic uses whole numbers only: ⌊\u00a0⌋ rounds down, ⌈\u00a0⌉ rounds up, " +
          "gcd is the greatest common divisor, and mod is the remainder.",
      ),
    );
  }
}
