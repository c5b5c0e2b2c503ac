// Compare: the six algorithms on the same traffic.
//
// The page sends one simulation request at a time. If the scenario changes meanwhile, only the newest change is sent next. A
// drag is therefore drawn while it happens, and sends no more requests than the server can answer.

import { Problem, post } from "./api.js";
import { controls } from "./controls.js";
import { byId, copy, make, newId, setText } from "./dom.js";
import { Lane } from "./lanes.js";
import { playback } from "./playback.js";
import { ALGORITHMS, fromQuery, labeled, toQuery } from "./scenario.js";
import { algorithmName } from "./units.js";

/** The delay before the address is updated; browsers limit how often it may change. */
const ADDRESS_DELAY_MS = 250;
/** The number of redraw times that are kept. */
const REDRAWS_KEPT = 100;

export class Compare {
  /**
   * @param explain called with the decision to explain
   * @param addressed called when the address changes
   */
  constructor(explain, addressed) {
    this.scenario = fromQuery("");
    this.client = 0;
    this.reply = null;
    this.since = null;
    this.frame = null;
    this.redraws = [];
    this.addressed = addressed;
    this.problem = byId("compare-problem");
    this.stage = byId("lanes");
    this.lanes = ALGORITHMS.map(() => new Lane(explain, { cumulative: true, policy: showPolicy }));
    this.stage.replaceChildren(...this.lanes.map((lane) => lane.element));
    const clientId = newId("client");
    this.clientList = make("select", {
      id: clientId,
      name: "client",
      onchange: () => this.showClient(Number(this.clientList.value)),
    });
    this.clientField = make(
      "span",
      { class: "inline", hidden: true },
      make("label", { for: clientId }, "Departures, state and curves of"),
      this.clientList,
    );
    byId("legend").replaceChildren(this.clientField, ...legend());
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

  /** Shows the scenario of an address. */
  take(query) {
    const scenario = fromQuery(query);
    this.client = Number(/(?:^|&)client=(\d{1,2})(?:&|$)/.exec(query)?.[1] ?? 0);
    if (this.reply && toQuery(scenario) === toQuery(this.scenario)) return;
    this.scenario = scenario;
    this.controls.set(scenario);
    this.changed(performance.now());
  }

  query() {
    const client = this.clientField.hidden || this.client === 0 ? "" : `client=${this.client}`;
    return [toQuery(this.scenario), client].filter(Boolean).join("&");
  }

  /** Shows the state and the curves of another client. */
  showClient(client) {
    this.client = client;
    this.show(this.reply);
    this.addressed();
  }

  changed(since) {
    clearTimeout(this.addressTimer);
    this.addressTimer = setTimeout(() => this.addressed(), ADDRESS_DELAY_MS);
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
        setText(this.problem, labeled(error.message));
      }
    }
    this.isAsking = false;
  }

  show(reply) {
    this.reply = reply;
    this.problem.hidden = true;
    this.stage.classList.remove("stale");
    const { clients } = reply.lanes[0];
    if (this.client >= clients.length) this.client = 0;
    this.clientField.hidden = clients.length === 1;
    this.clientList.replaceChildren(
      ...clients.map(({ name }, index) =>
        make("option", { value: index, selected: index === this.client }, name),
      ),
    );
    reply.lanes.forEach((lane, index) => this.lanes[index].show(lane, reply, this.client));
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

/** Waits until the browser has painted. */
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
    entry("allowed", "arrives, allowed"),
    entry("denied", "arrives, denied"),
    entry("departed", "leaves, after its delay"),
    entry("queue", "waiting to leave"),
    entry("worst", "worst window: the most allowed in any window"),
    entry("limit-line", "capacity; burst + rate"),
    entry("offered", "requested"),
    make(
      "span",
      { class: "tip" },
      "To see the arithmetic of a decision, click it, or select it with the arrow keys and press Enter.",
    ),
  ];
}

/** Shows the policy as a configuration file and as Rust code. */
function showPolicy(lane) {
  const dialog = byId("policy");
  const text = (title, text) => {
    const shown = make("code", {}, text);
    const button = make(
      "button",
      {
        type: "button",
        onclick: async () => {
          setText(button, (await copy(text, shown)) ? "Copied" : "Selected");
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
