// Backtest: what policies would have done to the traffic of an access log.
//
// The log goes up as it is, in one stream whose progress is shown; the server reads it, decides and forgets it.

import { asOperator, detailOf } from "./api.js";
import { byId, make, newId, table, tell } from "./dom.js";
import { count, percent } from "./units.js";

export class Backtest {
  constructor() {
    const fileId = newId("log");
    const keyId = newId("key");
    const policiesId = newId("policies");
    this.file = make("input", { id: fileId, type: "file", name: "log", onchange: () => this.take(this.file.files[0]) });
    this.named = make("p", { class: "about" }, "Combined or JSON lines, plain or gzip. It stays on this server, and only as long as it is read.");
    this.drop = make("div", { class: "drop",
      ondragover: (event) => {
        event.preventDefault();
        this.drop.classList.add("over-it");
      },
      ondragleave: () => this.drop.classList.remove("over-it"),
      ondrop: (event) => {
        event.preventDefault();
        this.drop.classList.remove("over-it");
        this.take(event.dataTransfer.files[0]);
      } }, make("label", { for: fileId }, "Drop an access log here, or choose one"), this.file, this.named);
    this.key = make("input", { id: keyId, name: "key", type: "text", value: "ip", spellcheck: false });
    this.policies = make("textarea", { id: policiesId, name: "policies", rows: 4, spellcheck: false },
      "token_bucket 100/1m burst 20\nsliding_window_counter 100/1m\nfixed_window 1000/1h");
    this.run = make("button", { type: "submit", class: "primary", disabled: true }, "Run");
    this.stop = make("button", { type: "button", hidden: true, onclick: () => this.request?.abort() }, "Stop");
    this.progress = make("progress", { max: 1, value: 0, hidden: true, "aria-label": "Sent" });
    this.state = make("output", { class: "state" });
    this.problem = make("p", { class: "problem", role: "alert", hidden: true });
    this.results = make("div", { class: "results" });
    byId("backtest").replaceChildren(
      make("form", { class: "columns", onsubmit: (event) => {
        event.preventDefault();
        this.send();
      } },
      this.drop,
      make("div", { class: "controls flat" },
        make("div", { class: "field" }, make("label", { for: keyId }, "Who is a client"), this.key),
        make("div", { class: "field" }, make("label", { for: policiesId }, "Policies, one a line"), this.policies),
        make("div", { class: "bar" }, this.run, this.stop, this.progress, this.state))),
      this.problem, this.results);
  }

  take(file) {
    if (!file) return;
    this.log = file;
    this.run.disabled = false;
    tell(this.named, `${file.name}, ${count(file.size)} bytes`);
  }

  send() {
    if (!this.log) return;
    const query = new URLSearchParams({ key: this.key.value });
    for (const line of this.policies.value.split("\n")) if (line.trim()) query.append("policy", line.trim());
    // `fetch` does not tell how much of a body has gone.
    const request = (this.request = new XMLHttpRequest());
    request.open("POST", `v1/backtest?${query}`);
    for (const [name, value] of Object.entries(asOperator())) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", ({ loaded, total }) => {
      this.progress.value = total > 0 ? loaded / total : 0;
      tell(this.state, loaded < total ? percent(loaded, total) : "deciding …");
    });
    request.addEventListener("load", () => {
      if (request.status === 200) this.show(JSON.parse(request.responseText));
      else this.fail(detailOf(request.responseText, request.status));
    });
    request.addEventListener("error", () => this.fail("the server does not answer, or took only part of the log"));
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
    request.send(this.log);
  }

  fail(detail) {
    this.problem.hidden = false;
    tell(this.problem, detail);
    tell(this.state, "");
    this.progress.hidden = true;
  }

  show(reply) {
    this.progress.value = 1;
    tell(this.state, `${count(reply.lines)} lines`);
    this.results.replaceChildren(table("What each policy would have done", ["policy", "#allowed", "#refused", "#share refused", "#clients refused"],
      reply.policies.map((policy) => [policy.policy, count(policy.allowed), count(policy.refused),
        percent(policy.refused, policy.allowed + policy.refused), count(policy.clients_refused)])));
  }
}
