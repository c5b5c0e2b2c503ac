// Backtest: the requests of an access log that policies would have denied.
//
// The page uploads the log unchanged and shows the progress. The server decides each request and does not keep the log.

import { credentials, detailOf, token } from "./api.js";
import { byId, make, newId, table, setText } from "./dom.js";
import { overTime } from "./plots.js";
import { tokenForm, tokenHelps } from "./token.js";
import { count, percent, wholeSpan } from "./units.js";

const POLICIES = ["token_bucket 100/1m burst 20", "sliding_window_counter 100/1m", "fixed_window 1000/1h"];
/** The share of clients to which a suggested limit denies nothing, in percent. */
const UNAFFECTED = "99.9";
const UNAUTHORIZED = 401;
/** What the user can do about a missing token. */
const NEEDS_TOKEN =
  "A backtest needs an admin token. Enter it here and press Use. A server without a configuration file prints one when it starts.";

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
      "Combined, JSON lines or CSV, plain or gzip. The server does not keep the log.",
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
        ["", "detect"],
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
    const text = (name, label, placeholder) => {
      const id = newId(name);
      const input = make("input", { id, name, type: "text", placeholder, spellcheck: false });
      return { input, field: make("div", { class: "field" }, make("label", { for: id }, label), input) };
    };
    this.time = text("time", "Time field", "detect");
    this.where = text("where", "Only lines with", "path=/api/*");
    this.status = text("status", "Only status", "200,4xx");
    this.excludeAgent = text("exclude-agent", "Not from agents with", "bot");
    this.suggest = make("input", { type: "checkbox", name: "suggest", checked: true });
    this.run = make("button", { type: "submit", class: "primary", disabled: true }, "Run");
    this.stop = make(
      "button",
      { type: "button", hidden: true, onclick: () => this.request?.abort() },
      "Stop",
    );
    this.progress = make("progress", { max: 1, value: 0, hidden: true, "aria-label": "Upload progress" });
    this.state = make("output", { class: "state" });
    this.problem = make("p", { class: "problem", role: "alert", hidden: true });
    this.results = make("div", { class: "results" });
    this.tokenForm = tokenForm(() => this.send());
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
            { class: "triple" },
            make(
              "div",
              { class: "field" },
              make("label", { for: keyId }, "Key"),
              this.key,
              make(
                "datalist",
                { id: keysId },
                ["ip", "header:x-api-key", "field:user"].map((value) => make("option", { value })),
              ),
            ),
            make("div", { class: "field" }, make("label", { for: formatId }, "Format"), this.format),
            this.time.field,
          ),
          make(
            "div",
            { class: "field" },
            make("label", { for: policiesId }, "Policies, one per line"),
            this.policies,
            make("p", { class: "about" }, "Commas separate several limits of one policy: gcra 5/s, fixed_window 1000/1h"),
          ),
          make("div", { class: "triple" }, this.where.field, this.status.field, this.excludeAgent.field),
          make(
            "div",
            { class: "field choice" },
            make("label", {}, this.suggest, ` Suggest the lowest limits that allow all requests of ${UNAFFECTED} % of clients`),
          ),
          make("div", { class: "bar" }, this.run, this.stop, this.progress, this.state),
        ),
      ),
      this.problem,
      this.tokenForm,
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
    setText(this.named, `${file.name}, ${count(file.size)} bytes`);
  }

  query() {
    const query = new URLSearchParams({ key: this.key.value });
    for (const line of this.policies.value.split("\n")) if (line.trim()) query.append("policy", line.trim());
    if (this.format.value) query.set("format", this.format.value);
    if (this.time.input.value) query.set("time", this.time.input.value);
    if (this.where.input.value) query.set("where", this.where.input.value);
    if (this.status.input.value) query.set("status", this.status.input.value);
    if (this.excludeAgent.input.value) query.set("exclude_agent", this.excludeAgent.input.value);
    if (this.suggest.checked) query.set("suggest", UNAFFECTED);
    return query;
  }

  send() {
    // `fetch` does not report the progress of an upload.
    const request = (this.request = new XMLHttpRequest());
    request.open("POST", `v1/backtest?${this.query()}`);
    for (const [name, value] of Object.entries(credentials())) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", ({ loaded, total }) => {
      this.progress.value = total > 0 ? loaded / total : 0;
      setText(this.state, loaded < total ? `${percent(loaded, total)} sent` : "running …");
    });
    request.addEventListener("load", () => {
      this.tokenForm.hidden = !tokenHelps(request.status);
      if (request.status === 200) this.show(JSON.parse(request.responseText));
      else if (request.status === UNAUTHORIZED)
        this.fail(token() ? `The server rejects this admin token. ${NEEDS_TOKEN}` : NEEDS_TOKEN);
      else this.fail(detailOf(request.responseText, request.status));
    });
    request.addEventListener("error", () =>
      this.fail("the server did not answer, or closed the connection before the end of the log"),
    );
    request.addEventListener("abort", () => this.fail("stopped"));
    request.addEventListener("loadend", () => {
      this.run.disabled = false;
      this.stop.hidden = true;
    });
    this.run.disabled = true;
    this.stop.hidden = false;
    this.problem.hidden = true;
    this.clear();
    this.progress.hidden = false;
    this.progress.value = 0;
    setText(this.state, "");
    request.send(this.log);
  }

  /** Removes the results of the previous run, so that they are not mistaken for those of this one. */
  clear() {
    this.plot?.destroy();
    this.plot = null;
    this.chart = null;
    this.results.replaceChildren();
  }

  fail(detail) {
    this.problem.hidden = false;
    setText(this.problem, detail);
    setText(this.state, "");
    this.progress.hidden = true;
  }

  show(report) {
    this.progress.value = 1;
    setText(this.state, `${count(report.lines)} lines read`);
    const skipped = [
      report.unreadable ? `${count(report.unreadable)} unreadable lines` : "",
      report.filtered ? `${count(report.filtered)} lines filtered out` : "",
      report.without_key ? `${count(report.without_key)} lines without a key` : "",
      ...report.filters_without_effect,
      ...report.cut_short.map(({ reason }) => `a log ended early: ${reason}`),
    ].filter(Boolean);
    const about = make(
      "p",
      {},
      `${count(report.requests)} requests from ${count(report.clients)} clients`,
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
          { class: "stacked" },
          table(
            "What each policy would have done",
            [
              "policy",
              "#allowed",
              "#denied",
              "#share denied",
              "#clients denied",
              "#share of clients",
              `suggested limit, which allows all requests of ${UNAFFECTED} % of clients`,
            ],
            report.policies.map((policy) => [
              make("code", {}, policy.policy),
              count(policy.allowed),
              count(policy.denied),
              percent(policy.denied, policy.allowed + policy.denied),
              count(policy.clients_denied),
              percent(policy.clients_denied, report.clients),
              suggested(policy) === null ? null : make("code", {}, suggested(policy)),
            ]),
          ),
        ),
      ),
      make(
        "section",
        { class: "box" },
        make("h2", {}, `Requests and denied requests per ${wholeSpan(report.over_time.step_s)}`),
        make(
          "div",
          { class: "legend" },
          ["requests", ...report.policies.map(({ policy }) => policy)].map((name, hue) =>
            make(
              "span",
              {},
              make("span", { class: `key line hue-${hue % 6}${hue ? " dashed" : ""}` }),
              hue ? `denied by ${name}` : name,
            ),
          ),
        ),
        this.chart,
      ),
      make(
        "div",
        { class: "columns" },
        ...report.policies
          .filter(({ most_denied: hit }) => hit.length > 0)
          .map((policy) =>
            make(
              "section",
              { class: "box stacked" },
              table(
                `Clients denied most by ${policy.policy}`,
                ["client", "#requests", "#denied", "#peak"],
                policy.most_denied.map((client) => [
                  client.client,
                  count(client.requests),
                  count(client.denied),
                  count(client.peak),
                ]),
              ),
            ),
          ),
        make(
          "section",
          { class: "box" },
          table(
            `Peak of each client within ${report.peaks.window}`,
            ["share of clients", "#requests, at most"],
            report.peaks.quantiles.map(({ share, requests }) => [`${share} %`, count(requests)]),
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
            "Unreadable lines",
            ["#line", "reason", "text"],
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
