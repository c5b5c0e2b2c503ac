// The lanes: one per algorithm, all with the same traffic and the same time axis.
//
// A lane shows decisions of the server and makes none itself. The user selects a decision with the pointer or the arrow keys
// and opens its explanation with a click or Enter.

import { make, newId, setText } from "./dom.js";
import { AREA, cumulative, decisions, decisionsHeight, departures, state } from "./plots.js";
import { algorithmName, clock, count, span } from "./units.js";

/** The lane of one algorithm. */
export class Lane {
  /**
   * @param onchoose called with the algorithm and the index of the decision to explain
   * @param parts the optional parts: `{ cumulative: true, policy: show }`
   */
  constructor(onchoose, parts = {}) {
    this.onchoose = onchoose;
    this.at = null;
    this.shownUpTo = Infinity;
    const readoutId = newId("readout");
    this.name = make("h3", { id: newId("lane") });
    this.policyText = make("code", { class: "policy-line" });
    this.figures = {
      allowed: make("output", { class: "figure allowed" }),
      denied: make("output", { class: "figure denied" }),
      worst: make("output", { class: "figure" }),
    };
    this.worstReason = make("p", { class: "notes worst-reason", hidden: true });
    this.notes = make("p", { class: "notes" });
    this.strip = make("div", {
      class: "strip",
      tabIndex: 0,
      role: "slider",
      "aria-labelledby": this.name.id,
      "aria-describedby": readoutId,
      "aria-valuemin": "1",
      onkeydown: (event) => this.key(event),
      onpointermove: (event) => this.point(event),
      onclick: (event) => {
        this.point(event);
        this.choose();
      },
    });
    this.leaving = make("div", { class: "leaving" });
    this.mark = make("div", { class: "mark", hidden: true });
    this.readout = make("p", { class: "readout", id: readoutId });
    this.stateName = make("span", { class: "plot-name" });
    const statePlot = make("div", { class: "plot" }, this.stateName);
    const timeline = make(
      "div",
      { class: "timeline" },
      make("div", { class: "plot" }, this.strip, veil()),
      make("div", { class: "plot departures" }, this.leaving, veil()),
      make("div", { class: "plot" }, statePlot, veil(), this.readout),
      this.mark,
    );
    const figure = (label, output, mark) =>
      make(
        "div",
        {},
        make("dt", {}, mark ? make("span", { class: `key ${mark}` }) : null, label),
        make("dd", {}, output),
      );
    const head = make(
      "div",
      { class: "lane-head" },
      make(
        "div",
        { class: "bar" },
        this.name,
        parts.policy
          ? make(
              "button",
              {
                type: "button",
                class: "quiet",
                title: "Show the policy as TOML and as Rust",
                onclick: () => parts.policy(this.lane),
              },
              "Code",
            )
          : null,
      ),
      this.policyText,
      make(
        "dl",
        { class: "figures" },
        figure("allowed", this.figures.allowed, "allowed"),
        figure("denied", this.figures.denied, "denied"),
        figure("worst window", this.figures.worst),
      ),
      this.worstReason,
      this.notes,
    );
    this.element = make(
      "article",
      { class: parts.cumulative ? "lane" : "lane lone", "aria-labelledby": this.name.id },
      head,
      timeline,
    );
    this.plots = {};
    this.make = () => {
      this.plots.decisions = decisions(this.strip, () => this.lane);
      this.plots.departures = departures(this.leaving, () => this.lane);
      this.plots.state = state(statePlot, () => this.lane);
      if (this.total) this.plots.cumulative = cumulative(this.total, () => this.lane);
    };
    if (parts.cumulative) {
      this.total = make("div", { class: "plot" }, make("span", { class: "plot-name" }, "departed so far"));
      this.element.append(
        make("div", { class: "total" }, make("div", { class: "plot" }, this.total, veil())),
      );
    }
  }

  /** Shows a lane of a reply. The state and the curves are those of one client. */
  show(lane, reply, shownClient = 0) {
    const client = lane.clients[shownClient] ?? lane.clients[0];
    const { state, cumulative, departures, worst_window } = client;
    const { at_us, allowed, delay_us } = lane.events;
    const isShown = (index) => allowed[index] === 1 && lane.clients[lane.events.client[index]] === client;
    this.lane = {
      ...lane,
      shownClient: lane.clients.indexOf(client),
      state,
      cumulative,
      departures,
      worst_window,
      departures_us: at_us.map((at, index) => at + delay_us[index]).filter((_, index) => isShown(index)),
      ideal: reply.ideal,
      offered: reply.offered[shownClient] ?? reply.offered[0],
      limit: reply.scenario.limit,
      duration_us: reply.scenario.duration_ms * 1000,
      window_us: reply.scenario.window_ms * 1000,
    };
    if (!this.plots.state) this.make();
    const { events } = this.lane;
    const height = decisionsHeight(lane.clients.length);
    if (this.plots.decisions.height !== height)
      this.plots.decisions.setSize({ width: this.plots.decisions.width, height });
    this.plots.decisions.setData([events.at_us, events.allowed]);
    this.plots.departures.setData([departures.at_us, departures.value]);
    this.plots.state.setData([state.at_us, state.value]);
    this.plots.cumulative?.setData([departures.at_us, departures.value]);
    setText(this.name, algorithmName(lane.algorithm));
    setText(this.policyText, lane.policy);
    const whose = lane.clients.length > 1 ? ` of ${client.name}` : "";
    if (this.total) setText(this.total.firstChild, `departed so far${whose}`);
    setText(this.stateName, `${state.name}${whose}${state.unit === state.name ? "" : `, in ${state.unit}`}`);
    const worst = worst_window;
    setText(this.figures.worst, `${count(worst.count)} of ${count(this.lane.limit)}`);
    const isOver = worst.count > this.lane.limit;
    this.figures.worst.classList.toggle("over", isOver);
    this.worstReason.hidden = !isOver;
    setText(this.worstReason, (isOver && lane.worst_window_reason) || "");
    const notes = [];
    const longest = delay_us.reduce((most, delay, index) => (isShown(index) ? Math.max(most, delay) : most), 0);
    if (longest > 0) notes.push(`longest delay${whose}: ${span(longest)}`);
    if (lane.division) {
      const { allowed_if_shared: shared, denied_with_room_elsewhere: unlucky } = lane.division;
      notes.push(
        `one shared quota: ${count(shared)} allowed`,
        `${count(unlucky)} denied although another instance had room`,
      );
    }
    if (lane.clients.length > 1) {
      notes.push(
        lane.clients
          .map((client) => `${client.name}: ${count(client.allowed)} of ${count(client.requests)}`)
          .join(", "),
      );
    }
    if (lane.retried > 0) notes.push(`${count(lane.retried)} retries, ${count(lane.gave_up)} gave up`);
    if (lane.cut_at_us !== undefined) notes.push(`stopped at ${clock(lane.cut_at_us)}: too many decisions`);
    this.notes.replaceChildren(...notes.map((note) => make("span", {}, note)));
    this.strip.setAttribute("aria-valuemax", Math.max(1, events.at_us.length));
    this.select(this.at === null ? null : Math.min(this.at, events.at_us.length - 1));
    this.upTo(this.shownUpTo);
  }

  /** Shows the counts up to a time. */
  upTo(us) {
    this.shownUpTo = us;
    if (!this.lane) return;
    const { at_us, allowed } = this.lane.events;
    let yes = this.lane.allowed;
    let no = this.lane.denied;
    if (us < this.lane.duration_us) {
      const end = after(at_us, us);
      yes = 0;
      for (let index = 0; index < end; index += 1) yes += allowed[index];
      no = end - yes;
    }
    setText(this.figures.allowed, count(yes));
    setText(this.figures.denied, count(no));
  }

  /** Marks a decision and describes it. */
  select(index) {
    const { at_us, allowed, client, instance, attempt, remaining, retry_after_us, delay_us } = this.lane.events;
    this.at = index === null || index < 0 || at_us.length === 0 ? null : index;
    this.mark.hidden = this.at === null;
    if (this.at === null) {
      setText(this.readout, at_us.length ? "" : "No requests.");
      this.strip.setAttribute("aria-valuenow", "1");
      this.strip.setAttribute("aria-valuetext", `${at_us.length} decisions`);
      return;
    }
    this.mark.style.setProperty("--at", at_us[index] / this.lane.duration_us);
    const who = this.lane.clients.length > 1 ? `, ${this.lane.clients[client[index]].name}` : "";
    const again = attempt[index] > 1 ? `, attempt ${attempt[index]}` : "";
    const where = this.lane.division ? `, instance ${instance[index] + 1}` : "";
    const wait = delay_us[index] ? `, leaves ${span(delay_us[index])} later` : "";
    const outcome = allowed[index]
      ? `allowed${wait}, ${count(remaining[index])} remaining`
      : `denied, ${retry_after_us[index] === null ? "the cost is above the limit" : `retry after ${span(retry_after_us[index])}`}`;
    const text = `#${index + 1} at ${clock(at_us[index])}${who}${where}${again}: ${outcome}`;
    setText(this.readout, text);
    this.strip.setAttribute("aria-valuenow", index + 1);
    this.strip.setAttribute("aria-valuetext", text);
  }

  choose() {
    if (this.at !== null) this.onchoose(this.lane.algorithm, this.at);
  }

  key(event) {
    const last = this.lane.events.at_us.length - 1;
    const here = this.at ?? -1;
    const to = {
      ArrowLeft: Math.max(0, here - 1),
      ArrowDown: Math.max(0, here - 1),
      ArrowRight: Math.min(last, here + 1),
      ArrowUp: Math.min(last, here + 1),
      PageUp: Math.min(last, here + 10),
      PageDown: Math.max(0, here - 10),
      Home: 0,
      End: last,
    }[event.key];
    if (to !== undefined) this.select(to);
    else if (event.key === "Enter" || event.key === " ") this.choose();
    else return;
    event.preventDefault();
  }

  /** Selects the decision nearest to the pointer, among those of the client whose row it is in. */
  point(event) {
    const { at_us, client } = this.lane.events;
    if (at_us.length === 0) return;
    const u = this.plots.decisions;
    const box = u.over.getBoundingClientRect();
    const us = u.posToVal(event.clientX - box.left, "x");
    const row = Math.floor(((event.clientY - box.top) / box.height) * this.lane.clients.length);
    let nearest = null;
    at_us.forEach((at, index) => {
      if (client[index] !== row && this.lane.clients.length > 1) return;
      if (nearest === null || Math.abs(at - us) < Math.abs(at_us[nearest] - us)) nearest = index;
    });
    if (nearest !== null) this.select(nearest);
  }

  resize() {
    for (const [plot, into] of [
      [this.plots.decisions, this.strip],
      [this.plots.departures, this.strip],
      [this.plots.state, this.strip],
      [this.plots.cumulative, this.total],
    ]) {
      if (plot && into.clientWidth > 0) plot.setSize({ width: into.clientWidth, height: plot.height });
    }
  }

  redraw() {
    for (const plot of Object.values(this.plots)) plot.redraw(false, true);
  }

  /** Returns the data of the plots. */
  plotted() {
    const drawn = (plot) => ({ at_us: [...plot.data[0]], value: [...plot.data[1]] });
    return {
      algorithm: this.lane.algorithm,
      decisions: { ...drawn(this.plots.decisions), client: [...this.lane.events.client] },
      state: drawn(this.plots.state),
      departures: drawn(this.plots.cumulative),
      departures_us: this.lane.departures_us,
      client: this.lane.clients[this.lane.shownClient].name,
      cumulative: this.lane.cumulative,
      ideal: this.lane.ideal,
      offered: this.lane.offered,
      worst_window: this.lane.worst_window,
      figures: Object.fromEntries(
        Object.entries(this.figures).map(([name, output]) => [name, output.textContent]),
      ),
    };
  }
}

/** Creates the veil that hides the time after the current one. */
function veil() {
  const veil = make("div", { class: "veil" });
  veil.style.setProperty("--gutter", `${AREA.left}px`);
  veil.style.setProperty("--right", `${AREA.right}px`);
  return veil;
}

/** Returns how many values of a sorted list are at most `value`. */
export function after(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}
