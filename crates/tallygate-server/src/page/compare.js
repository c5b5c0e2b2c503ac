// Compare: the six algorithms on the same traffic.
//
// One question is with the server at a time. What changes meanwhile is asked next, the newest only: so a drag is drawn
// as it goes, and costs the server no more than it can answer.

import { Problem, post } from "./api.js";
import { controls } from "./controls.js";
import { byId, copy, make, tell } from "./dom.js";
import { Lane } from "./lanes.js";
import { playback } from "./playback.js";
import { ALGORITHMS, fromQuery, toQuery } from "./scenario.js";
import { algorithmName } from "./units.js";

/** How long the address rests before it is written: browsers take only so many changes. */
const ADDRESS_RESTS_MS = 250;
/** Of how many changes it is kept how long they took. */
const REDRAWS_KEPT = 100;

export class Compare {
  /**
   * @param explain is told which decision is to be explained
   * @param addressed is told that the address changed
   */
  constructor(explain, addressed) {
    this.scenario = fromQuery("");
    this.reply = null;
    this.since = null;
    this.frame = null;
    this.redraws = [];
    this.addressed = addressed;
    this.problem = byId("compare-problem");
    this.stage = byId("lanes");
    this.lanes = ALGORITHMS.map(() => new Lane(explain, { cumulative: true, policy: showPolicy }));
    this.stage.replaceChildren(...this.lanes.map((lane) => lane.element));
    byId("legend").replaceChildren(...legend());
    this.playback = playback(byId("playback"), (us, part) => {
      this.stage.style.setProperty("--now", part);
      this.stage.classList.toggle("part", part < 1);
      for (const lane of this.lanes) lane.upTo(us);
    });
    this.controls = controls(byId("scenario"), this.scenario, (scenario) => {
      this.scenario = scenario;
      this.changed(performance.now());
    });
    new ResizeObserver(() => this.resize()).observe(this.stage);
  }

  /** Takes the scenario of an address. */
  take(query) {
    const scenario = fromQuery(query);
    if (this.reply && toQuery(scenario) === toQuery(this.scenario)) return;
    this.scenario = scenario;
    this.controls.set(scenario);
    this.changed(performance.now());
  }

  query() {
    return toQuery(this.scenario);
  }

  changed(since) {
    clearTimeout(this.resting);
    this.resting = setTimeout(() => this.addressed(), ADDRESS_RESTS_MS);
    this.since ??= since;
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      if (!this.isAsking) this.ask();
    });
  }

  async ask() {
    this.isAsking = true;
    while (this.since) {
      const since = this.since;
      this.since = null;
      try {
        this.show(await post("v1/simulate", this.scenario));
        await painted();
        this.redraws = [...this.redraws.slice(1 - REDRAWS_KEPT), performance.now() - since];
      } catch (error) {
        if (!(error instanceof Problem)) throw error;
        this.stage.classList.add("stale");
        this.problem.hidden = false;
        tell(this.problem, error.message);
      }
    }
    this.isAsking = false;
  }

  show(reply) {
    this.reply = reply;
    this.problem.hidden = true;
    this.stage.classList.remove("stale");
    reply.lanes.forEach((lane, index) => this.lanes[index].show(lane, reply));
    const instants = new Float64Array(reply.lanes.flatMap((lane) => lane.events.at_us)).sort();
    this.playback.set(reply.scenario.duration_ms * 1000, instants);
    this.onshown?.(reply);
  }

  resize() {
    if (this.reply) for (const lane of this.lanes) lane.resize();
  }

  redraw() {
    if (this.reply) for (const lane of this.lanes) lane.redraw();
  }

  hidden() {
    this.playback.pause();
  }

  plotted() {
    return this.reply ? this.lanes.map((lane) => lane.plotted()) : null;
  }
}

/** Waits until what was drawn is on the screen. */
function painted() {
  return new Promise((done) =>
    requestAnimationFrame(() => {
      const channel = new MessageChannel();
      channel.port1.onmessage = done;
      channel.port2.postMessage(null);
    }),
  );
}

function legend() {
  const entry = (kind, text) => make("span", {}, make("span", { class: `key ${kind}` }), text);
  return [
    entry("allowed", "allowed"),
    entry("refused", "refused"),
    entry("worst", "the worst window"),
    entry("limit-line", "capacity, ideal line"),
    entry("offered", "offered"),
    make(
      "span",
      { class: "tip" },
      "Click a decision, or walk them by arrow keys and press Enter, to see its arithmetic.",
    ),
  ];
}

/** The policy as a configuration and as a program has it. */
function showPolicy(lane) {
  const dialog = byId("policy");
  const text = (title, text) => {
    const shown = make("code", {}, text);
    const button = make(
      "button",
      {
        type: "button",
        onclick: async () => {
          tell(button, (await copy(text, shown)) ? "Copied" : "Selected");
        },
      },
      "Copy",
    );
    return make(
      "section",
      {},
      make("div", { class: "bar" }, make("h3", {}, title), button),
      make("pre", {}, shown),
    );
  };
  dialog.replaceChildren(
    make(
      "div",
      { class: "bar" },
      make("h2", { id: "policy-title" }, algorithmName(lane.algorithm)),
      make("button", { type: "button", onclick: () => dialog.close() }, "Close"),
    ),
    text("TOML", lane.toml),
    text("Rust", lane.rust),
  );
  dialog.showModal();
}
