// The lanes: one for each algorithm, all on the same traffic and the same axis of time.
//
// A lane shows what the server decided and decides nothing. Its decisions are walked by arrow keys, or pointed at; the
// one that is chosen is handed on to be explained.

import { make, newId, tell } from "./dom.js";
import { AREA, cumulative, decisions, decisionsHeight, state } from "./plots.js";
import { algorithmName, clock, count, span } from "./units.js";

/** One algorithm's lane. `chosen` is told the decision that somebody wants explained, by its place. */
export class Lane {
  /** @param parts what is drawn: `{ cumulative: true, policy: show }`; both may be left out. */
  constructor(chosen, parts = {}) {
    this.chosen = chosen;
    this.at = null;
    this.shownUpTo = Infinity;
    const readoutId = newId("readout");
    this.name = make("h3", { id: newId("lane") });
    this.policyText = make("code", { class: "policy-line" });
    this.figures = {
      allowed: make("output", { class: "figure allowed" }),
      refused: make("output", { class: "figure refused" }),
      worst: make("output", { class: "figure" }),
    };
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
    this.mark = make("div", { class: "mark", hidden: true });
    this.readout = make("p", { class: "readout", id: readoutId });
    this.stateName = make("span", { class: "plot-name" });
    const statePlot = make("div", { class: "plot" }, this.stateName);
    const timeline = make(
      "div",
      { class: "timeline" },
      make("div", { class: "plot" }, this.strip, veil()),
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
                title: "The policy as TOML and as Rust",
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
        figure("refused", this.figures.refused, "refused"),
        figure("worst window", this.figures.worst),
      ),
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
      this.plots.decisions = decisions(
        this.strip,
        () => this.lane,
        () => this.lane.window_us,
      );
      this.plots.state = state(statePlot, () => this.lane);
      if (this.total) this.plots.cumulative = cumulative(this.total, () => this.lane);
    };
    if (parts.cumulative) {
      this.total = make("div", { class: "plot" }, make("span", { class: "plot-name" }, "admitted so far"));
      this.element.append(
        make("div", { class: "total" }, make("div", { class: "plot" }, this.total, veil())),
      );
    }
  }

  /** Shows a lane of a reply, with what all of them share. */
  show(lane, reply) {
    this.lane = {
      ...lane,
      ideal: reply.ideal,
      offered: reply.offered,
      limit: reply.scenario.limit,
      duration_us: reply.scenario.duration_ms * 1000,
      window_us: reply.scenario.window_ms * 1000,
    };
    if (!this.plots.state) this.make();
    const { events, state, cumulative } = this.lane;
    const height = decisionsHeight(lane.clients.length);
    if (this.plots.decisions.height !== height)
      this.plots.decisions.setSize({ width: this.plots.decisions.width, height });
    this.plots.decisions.setData([events.at_us, events.allowed]);
    this.plots.state.setData([state.at_us, state.value]);
    this.plots.cumulative?.setData([cumulative.at_us, cumulative.value]);
    tell(this.name, algorithmName(lane.algorithm));
    tell(this.policyText, lane.policy);
    const whose = lane.clients.length > 1 ? ` of ${lane.clients[0].name}` : "";
    tell(this.stateName, `${state.name}${whose}${state.unit === state.name ? "" : `, in ${state.unit}`}`);
    const worst = lane.worst_window;
    tell(this.figures.worst, `${count(worst.count)} of ${count(this.lane.limit)}`);
    this.figures.worst.classList.toggle("over", worst.count > this.lane.limit);
    const notes = [];
    if (lane.clients.length > 1) {
      notes.push(
        lane.clients
          .map((client) => `${client.name}: ${count(client.allowed)} of ${count(client.asked)}`)
          .join(", "),
      );
    }
    if (lane.retried > 0) notes.push(`${count(lane.retried)} retries, ${count(lane.gave_up)} gave up`);
    if (lane.cut_at_us !== undefined) notes.push(`cut at ${clock(lane.cut_at_us)}: too many decisions`);
    tell(this.notes, notes.join("; "));
    this.strip.setAttribute("aria-valuemax", Math.max(1, events.at_us.length));
    this.select(this.at === null ? null : Math.min(this.at, events.at_us.length - 1));
    this.upTo(this.shownUpTo);
  }

  /** Counts what was decided until an instant. */
  upTo(us) {
    this.shownUpTo = us;
    if (!this.lane) return;
    const { at_us, allowed } = this.lane.events;
    let yes = this.lane.allowed;
    let no = this.lane.refused;
    if (us < this.lane.duration_us) {
      const end = after(at_us, us);
      yes = 0;
      for (let index = 0; index < end; index += 1) yes += allowed[index];
      no = end - yes;
    }
    tell(this.figures.allowed, count(yes));
    tell(this.figures.refused, count(no));
  }

  /** Marks a decision and says what it was. */
  select(index) {
    const { at_us, allowed, client, attempt, remaining, retry_after_us } = this.lane.events;
    this.at = index === null || index < 0 || at_us.length === 0 ? null : index;
    this.mark.hidden = this.at === null;
    if (this.at === null) {
      tell(this.readout, at_us.length ? "" : "Nobody comes.");
      this.strip.setAttribute("aria-valuenow", "1");
      this.strip.setAttribute("aria-valuetext", `${at_us.length} decisions`);
      return;
    }
    this.mark.style.setProperty("--at", at_us[index] / this.lane.duration_us);
    const who = this.lane.clients.length > 1 ? `, ${this.lane.clients[client[index]].name}` : "";
    const again = attempt[index] > 1 ? `, attempt ${attempt[index]}` : "";
    const told = allowed[index]
      ? `allowed, ${count(remaining[index])} left`
      : `refused, ${retry_after_us[index] === null ? "can never fit" : `retry after ${span(retry_after_us[index])}`}`;
    const text = `#${index + 1} at ${clock(at_us[index])}${who}${again}: ${told}`;
    tell(this.readout, text);
    this.strip.setAttribute("aria-valuenow", index + 1);
    this.strip.setAttribute("aria-valuetext", text);
  }

  choose() {
    if (this.at !== null) this.chosen(this.lane.algorithm, this.at);
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

  /** Selects the decision that is nearest to the pointer, of the client in whose row it is. */
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
      [this.plots.state, this.strip],
      [this.plots.cumulative, this.total],
    ]) {
      if (plot && into.clientWidth > 0) plot.setSize({ width: into.clientWidth, height: plot.height });
    }
  }

  redraw() {
    for (const plot of Object.values(this.plots)) plot.redraw(false, true);
  }

  /** What the plots hold now. */
  plotted() {
    const drawn = (plot) => ({ at_us: [...plot.data[0]], value: [...plot.data[1]] });
    return {
      algorithm: this.lane.algorithm,
      decisions: { ...drawn(this.plots.decisions), client: [...this.lane.events.client] },
      state: drawn(this.plots.state),
      cumulative: drawn(this.plots.cumulative),
      ideal: this.lane.ideal,
      offered: this.lane.offered,
      worst_window: this.lane.worst_window,
      figures: Object.fromEntries(
        Object.entries(this.figures).map(([name, output]) => [name, output.textContent]),
      ),
    };
  }
}

/** What hides the time that has not come yet. */
function veil() {
  const veil = make("div", { class: "veil" });
  veil.style.setProperty("--gutter", `${AREA.left}px`);
  veil.style.setProperty("--right", `${AREA.right}px`);
  return veil;
}

/** How many of a sorted list are at or before a value. */
export function after(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}
