// Backtest: what policies would have done to the traffic of an access log.
//
// The log goes up as it is, in one stream whose progress is shown; the server reads it, decides and forgets it.

import { credentials, detailOf } from "./api.js";
import { byId, make, newId, table, tell } from "./dom.js";
import { overTime } from "./plots.js";
import { count, percent } from "./units.js";

const POLICIES = ["token_bucket 100/1m burst 20", "sliding_window_counter 100/1m", "fixed_window 1000/1h"];
/** The share of clients that a suggested limit spares, in percent. */
const SPARED = "99.9";
const UNAUTHORIZED = 401;

export class Backtest {
  constructor() {
    const fileId = newId("log");
    const keyId = newId("key");
    const formatId = newId("format");
    const policiesId = newId("policies");
    const keysId = newId("keys");
    this.file = make("input", {
      id: fileId,
      type: "file",
      name: "log",
      onchange: () => this.take(this.file.files[0]),
    });
    this.named = make(
      "p",
      { class: "about" },
      "Combined, JSON lines or CSV, plain or compressed. This server reads it, decides, and forgets it.",
    );
    this.drop = make(
      "div",
      {
        class: "drop",
        ondragover: (event) => {
          event.preventDefault();
          this.drop.classList.add("over-it");
        },
        ondragleave: () => this.drop.classList.remove("over-it"),
        ondrop: (event) => {
          event.preventDefault();
          this.drop.classList.remove("over-it");
          this.take(event.dataTransfer.files[0]);
        },
      },
      make("label", { for: fileId }, "Drop an access log here, or choose one"),
      this.file,
      this.named,
    );
    this.key = make("input", {
      id: keyId,
      name: "key",
      type: "text",
      value: "ip",
      spellcheck: false,
      list: keysId,
    });
    this.format = make(
      "select",
      { id: formatId, name: "format" },
      [
        ["", "as it looks"],
        ["combined", "combined"],
        ["json", "JSON lines"],
        ["csv", "CSV"],
      ].map(([value, label]) => make("option", { value }, label)),
    );
    this.policies = make(
      "textarea",
      { id: policiesId, name: "policies", rows: 4, spellcheck: false },
      POLICIES.join("\n"),
    );
    this.suggest = make("input", { type: "checkbox", name: "suggest", checked: true });
    this.run = make("button", { type: "submit", class: "primary", disabled: true }, "Run");
    this.stop = make(
      "button",
      { type: "button", hidden: true, onclick: () => this.request?.abort() },
      "Stop",
    );
    this.progress = make("progress", { max: 1, value: 0, hidden: true, "aria-label": "Sent" });
    this.state = make("output", { class: "state" });
    this.problem = make("p", { class: "problem", role: "alert", hidden: true });
    this.results = make("div", { class: "results" });
    byId("backtest").replaceChildren(
      make(
        "form",
        {
          class: "columns",
          onsubmit: (event) => {
            event.preventDefault();
            this.send();
          },
        },
        this.drop,
        make(
          "div",
          { class: "controls flat" },
          make(
            "div",
            { class: "pair" },
            make(
              "div",
              { class: "field" },
              make("label", { for: keyId }, "Who is a client"),
              this.key,
              make(
                "datalist",
                { id: keysId },
                ["ip", "header:x-api-key", "field:user"].map((value) => make("option", { value })),
              ),
            ),
            make("div", { class: "field" }, make("label", { for: formatId }, "Format"), this.format),
          ),
          make(
            "div",
            { class: "field" },
            make("label", { for: policiesId }, "Policies, one a line"),
            this.policies,
          ),
          make(
            "div",
            { class: "field choice" },
            make("label", {}, this.suggest, ` Suggest limits that spare ${SPARED} % of clients`),
          ),
          make("div", { class: "bar" }, this.run, this.stop, this.progress, this.state),
        ),
      ),
      this.problem,
      this.results,
    );
    new ResizeObserver(
      () =>
        this.chart?.clientWidth > 0 &&
        this.plot.setSize({ width: this.chart.clientWidth, height: this.plot.height }),
    ).observe(this.results);
  }

  take(file) {
    if (!file) return;
    this.log = file;
    this.run.disabled = false;
    tell(this.named, `${file.name}, ${count(file.size)} bytes`);
  }

  query() {
    const query = new URLSearchParams({ key: this.key.value });
    for (const line of this.policies.value.split("\n")) if (line.trim()) query.append("policy", line.trim());
    if (this.format.value) query.set("format", this.format.value);
    if (this.suggest.checked) query.set("suggest", SPARED);
    return query;
  }

  send() {
    // `fetch` does not tell how much of a body has gone.
    const request = (this.request = new XMLHttpRequest());
    request.open("POST", `v1/backtest?${this.query()}`);
    for (const [name, value] of Object.entries(credentials())) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", ({ loaded, total }) => {
      this.progress.value = total > 0 ? loaded / total : 0;
      tell(this.state, loaded < total ? `${percent(loaded, total)} sent` : "deciding …");
    });
    request.addEventListener("load", () => {
      if (request.status === 200) this.show(JSON.parse(request.responseText));
      else if (request.status === UNAUTHORIZED)
        this.fail("this is for the operator; give the admin token under Live");
      else this.fail(detailOf(request.responseText, request.status));
    });
    request.addEventListener("error", () =>
      this.fail("the server does not answer, or took only part of the log"),
    );
    request.addEventListener("abort", () => this.fail("stopped"));
    request.addEventListener("loadend", () => {
      this.run.disabled = false;
      this.stop.hidden = true;
    });
    this.run.disabled = true;
    this.stop.hidden = false;
    this.problem.hidden = true;
    this.progress.hidden = false;
    this.progress.value = 0;
    tell(this.state, "");
    request.send(this.log);
  }

  fail(detail) {
    this.problem.hidden = false;
    tell(this.problem, detail);
    tell(this.state, "");
    this.progress.hidden = true;
  }

  show(report) {
    this.progress.value = 1;
    tell(this.state, `${count(report.lines)} lines read`);
    const skipped = [
      report.unreadable ? `${count(report.unreadable)} lines could not be read` : "",
      report.without_key ? `${count(report.without_key)} have no client` : "",
      ...report.cut_short.map(({ reason }) => `cut short: ${reason}`),
    ].filter(Boolean);
    const about = make(
      "p",
      {},
      `${count(report.requests)} requests of ${count(report.clients)} clients`,
      report.from ? ` from ${report.from} to ${report.to}` : "",
      skipped.length ? `; ${skipped.join(", ")}` : "",
      ".",
    );
    const suggested = ({ suggestion }) => (suggestion ? (suggestion.policy ?? suggestion.reason) : null);
    this.chart = make("div", { class: "plot" });
    this.results.replaceChildren(
      make(
        "section",
        { class: "box" },
        about,
        make(
          "div",
          { class: "scroll" },
          table(
            "What each policy would have done",
            [
              "policy",
              "#allowed",
              "#refused",
              "#share",
              "#clients refused",
              "#share",
              `spares ${SPARED} % of clients`,
            ],
            report.policies.map((policy) => [
              make("code", {}, policy.policy),
              count(policy.allowed),
              count(policy.refused),
              percent(policy.refused, policy.allowed + policy.refused),
              count(policy.clients_refused),
              percent(policy.clients_refused, report.clients),
              suggested(policy) === null ? null : make("code", {}, suggested(policy)),
            ]),
          ),
        ),
      ),
      make(
        "section",
        { class: "box" },
        make("h2", {}, `Requests and refusals, each ${count(report.over_time.step_s)} s`),
        make(
          "div",
          { class: "legend" },
          ["requests", ...report.policies.map(({ policy }) => policy)].map((name, hue) =>
            make(
              "span",
              {},
              make("span", { class: `key line hue-${hue % 6}${hue ? " dashed" : ""}` }),
              hue ? `refused by ${name}` : name,
            ),
          ),
        ),
        this.chart,
      ),
      make(
        "div",
        { class: "columns" },
        ...report.policies
          .filter(({ hardest_hit: hit }) => hit.length > 0)
          .map((policy) =>
            make(
              "section",
              { class: "box scroll" },
              table(
                `Hardest hit by ${policy.policy}`,
                ["client", "#requests", "#refused", "#peak"],
                policy.hardest_hit.map((client) => [
                  client.client,
                  count(client.requests),
                  count(client.refused),
                  count(client.peak),
                ]),
              ),
            ),
          ),
        make(
          "section",
          { class: "box" },
          table(
            `The busiest ${report.peaks.window} of each client`,
            ["share of clients", "#at most"],
            report.peaks.quantiles.map(({ share, requests }) => [
              `${share} %`,
              `${count(requests)} requests`,
            ]),
          ),
        ),
      ),
    );
    if (report.unreadable_lines.length > 0) {
      this.results.append(
        make(
          "section",
          { class: "box scroll" },
          table(
            "Lines that could not be read",
            ["#line", "why", "text"],
            report.unreadable_lines.map(({ line, reason, text }) => [
              count(line),
              reason,
              make("code", {}, text),
            ]),
          ),
        ),
      );
    }
    this.plot = overTime(this.chart, report);
  }

  redraw() {
    this.plot?.redraw(false, true);
  }
}
