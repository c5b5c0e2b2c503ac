// Clients: real decisions of the running server, and the remaining quota of each client.
//
// Each button press sends `POST /v1/check`. The remaining quota comes from `POST /v1/peek`, which charges nothing. The page
// sends it only while this tab is visible.

import { get, post, postWhole } from "./api.js";
import { byId, make, newId, setText } from "./dom.js";
import { count } from "./units.js";

const PEEK_INTERVAL_MS = 200;
const HOLD_INTERVAL_MS = 50;
const COUNTDOWN_INTERVAL_MS = 100;
/** The number of decisions in the history of a client. */
const HISTORY_LENGTH = 60;

export class Clients {
  constructor() {
    this.clients = [];
    this.policies = null;
    const policyId = newId("policy");
    const tierId = newId("tier");
    const costId = newId("cost");
    this.policyList = make("select", { id: policyId, name: "policy", onchange: () => this.choosePolicy() });
    this.policyName = make("input", {
      id: policyId,
      name: "policy",
      type: "text",
      value: "demo",
      spellcheck: false,
      onchange: () => this.choosePolicy(),
    });
    this.policyPlace = make("span", {}, this.policyName);
    this.rule = make("code", { class: "policy-line" });
    this.tier = make("select", { id: tierId, name: "tier", onchange: () => this.choosePolicy() });
    this.tierField = make("span", { class: "inline" }, make("label", { for: tierId }, "Tier"), this.tier);
    this.cost = make("input", { id: costId, name: "cost", type: "number", min: 0, max: 1_000_000, value: 1 });
    this.list = make("ul", { class: "cards" });
    const name = make("input", {
      type: "text",
      name: "new-client",
      placeholder: "Add a client",
      "aria-label": "Key of the new client",
      spellcheck: false,
    });
    const add = make(
      "form",
      {
        class: "bar add",
        onsubmit: (event) => {
          event.preventDefault();
          if (name.value) this.add(name.value);
          name.value = "";
        },
      },
      name,
      make("button", { type: "submit" }, "Add"),
    );
    this.replyHead = make("p", { class: "status" }, "No request sent yet.");
    this.replyFields = make("dl", { class: "header-fields" });
    this.replyBody = make("code", {});
    byId("clients").replaceChildren(
      make(
        "div",
        { class: "bar chooser" },
        make("span", { class: "inline" }, make("label", { for: policyId }, "Policy"), this.policyPlace),
        this.tierField,
        make("span", { class: "inline" }, make("label", { for: costId }, "Cost"), this.cost),
        this.rule,
      ),
      make(
        "div",
        { class: "columns wide" },
        make("div", {}, this.list, add),
        make(
          "section",
          { class: "reply", "aria-label": "Last response" },
          make("h2", {}, "Last response"),
          this.replyHead,
          this.replyFields,
          make("pre", {}, this.replyBody),
        ),
      ),
    );
    for (const name of ["alice", "bob", "carol"]) this.add(name);
  }

  add(name) {
    const client = new Client(
      name,
      (client) => this.send(client),
      (client) => {
        this.clients = this.clients.filter((other) => other !== client);
        client.element.remove();
      },
    );
    this.clients.push(client);
    this.list.append(client.element);
  }

  async shown() {
    this.isVisible = true;
    if (!this.policies) await this.findPolicies();
    this.peek();
  }

  hidden() {
    this.isVisible = false;
    clearTimeout(this.peekTimer);
    for (const client of this.clients) client.release();
  }

  /** Reads the list of policies. If the user may not see it, the user types a name instead. */
  async findPolicies() {
    try {
      this.policies = (await get("v1/policies")).policies;
    } catch {
      this.policies = null;
    }
    const known = this.policies ?? [];
    this.policyList.replaceChildren(...known.map(({ name }) => make("option", { value: name }, name)));
    this.policyPlace.replaceChildren(this.policies ? this.policyList : this.policyName);
    this.choosePolicy();
  }

  choosePolicy() {
    const policy = this.policies?.find(({ name }) => name === this.policyList.value);
    const tiers = policy?.tiers ?? [];
    const tier = tiers.find(({ name }) => name === this.tier.value);
    this.tierField.hidden = tiers.length === 0;
    this.tier.replaceChildren(
      make("option", { value: "" }, "none"),
      ...tiers.map(({ name }) => make("option", { value: name, selected: name === tier?.name }, name)),
    );
    setText(this.rule, (tier ?? policy)?.rule ?? "");
    // A typed name may be wrong, so the page does not peek before a request has succeeded.
    this.isKnown = policy !== undefined;
  }

  question(client, cost) {
    const policy = this.policies ? this.policyList.value : this.policyName.value;
    const tier = this.tier.value;
    return { policy, key: client.key(), cost, ...(tier ? { tier } : {}) };
  }

  async send(client) {
    // An empty field means the default cost. A cost of 0 is sent as 0.
    const question = this.question(client, this.cost.value === "" ? 1 : Number(this.cost.value));
    let reply;
    try {
      reply = await postWhole("v1/check?headers=all", question);
    } catch {
      client.failed("the server does not answer");
      return;
    }
    this.show(reply);
    const answer = parsed(reply.text);
    if (!reply.ok) {
      client.failed(answer?.detail ?? `the server answered with status ${reply.status}`);
      return;
    }
    this.isKnown = true;
    client.decided(answer);
  }

  show({ status, fields, text }) {
    setText(this.replyHead, `HTTP ${status}`);
    this.replyFields.replaceChildren(
      ...fields.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]),
    );
    const answer = parsed(text);
    setText(this.replyBody, answer ? JSON.stringify(answer, null, 2) : text);
  }

  async peek() {
    clearTimeout(this.peekTimer);
    const peeked = this.clients.slice();
    if (this.isKnown && peeked.length > 0 && document.visibilityState === "visible") {
      try {
        const { results } = await post("v1/peek", {
          checks: peeked.map((client) => this.question(client, 0)),
        });
        peeked.forEach((client, index) => client.left(results[index]));
      } catch {
        // The next request that the user sends shows the error.
        this.isKnown = false;
      }
    }
    if (this.isVisible) this.peekTimer = setTimeout(() => this.peek(), PEEK_INTERVAL_MS);
  }
}

/** A client: its name, its buttons, its remaining quota and its decisions. */
class Client {
  constructor(name, send, remove) {
    this.send = () => send(this);
    this.allowed = 0;
    this.denied = 0;
    this.name = make("input", {
      class: "client-name",
      type: "text",
      value: name,
      "aria-label": "Key of the client",
      spellcheck: false,
    });
    this.fill = make("div", { class: "fill" });
    this.meter = make(
      "div",
      { class: "meter", role: "meter", "aria-label": "Remaining", "aria-valuemin": "0" },
      this.fill,
    );
    this.remaining = make("output", { class: "left" }, "–");
    this.counts = make("output", { class: "counts" }, "0 allowed, 0 denied");
    this.history = make("ol", { class: "history", "aria-label": "Decisions" });
    this.message = make("p", { class: "message" });
    const hold = make(
      "button",
      {
        type: "button",
        class: "hold",
        onpointerdown: () => this.hold(),
        onpointerup: () => this.release(),
        onpointercancel: () => this.release(),
        onpointerleave: () => this.release(),
        onblur: () => this.release(),
        oncontextmenu: (event) => event.preventDefault(),
        onkeydown: (event) => {
          if (event.key === " " || event.key === "Enter") {
            event.preventDefault();
            if (!event.repeat) this.hold();
          }
        },
        onkeyup: () => this.release(),
      },
      "Hold to send",
    );
    this.element = make(
      "li",
      { class: "card" },
      make(
        "div",
        { class: "bar" },
        this.name,
        make(
          "button",
          {
            type: "button",
            class: "quiet",
            "aria-label": "Remove",
            title: "Remove",
            onclick: () => remove(this),
          },
          "×",
        ),
      ),
      make("div", { class: "allowance" }, this.meter, this.remaining),
      make(
        "div",
        { class: "bar sends" },
        make("button", { type: "button", class: "primary", onclick: () => this.send() }, "Send 1"),
        make(
          "button",
          { type: "button", onclick: () => this.sendTen() },
          "Send 10",
        ),
        hold,
        this.counts,
      ),
      this.history,
      this.message,
    );
  }

  key() {
    return this.name.value;
  }

  /** Sends ten requests, one after the other, so that the history shows the decisions in their order. */
  async sendTen() {
    for (let sent = 0; sent < 10; sent += 1) await this.send();
  }

  async hold() {
    if (this.isHeld) return;
    this.isHeld = true;
    while (this.isHeld) {
      await Promise.all([this.send(), new Promise((done) => setTimeout(done, HOLD_INTERVAL_MS))]);
    }
  }

  release() {
    this.isHeld = false;
  }

  decided(decision) {
    if (decision.allowed) this.allowed += 1;
    else this.denied += 1;
    setText(this.counts, `${count(this.allowed)} allowed, ${count(this.denied)} denied`);
    this.history.append(
      make("li", {
        class: `key ${decision.allowed ? "allowed" : "denied"}`,
        title: decision.allowed ? "allowed" : "denied",
      }),
    );
    while (this.history.children.length > HISTORY_LENGTH) this.history.firstChild.remove();
    clearTimeout(this.countdown);
    if (decision.allowed) setText(this.message, "");
    else this.showDenial(decision);
    this.left(decision);
  }

  /** Counts down to the retry time of a denial, and then says that a retry can succeed. */
  showDenial({ denied_by: by, retry_after_ms: wait, limit }) {
    const denied = `Denied${by ? ` by ${by}` : ""}`;
    if (wait === null) {
      const reason = limit === 0 ? "the client is blocked" : "the cost is above the limit";
      setText(this.message, `${denied}: ${reason}, so no wait helps.`);
      return;
    }
    const until = performance.now() + wait;
    const step = () => {
      const left = until - performance.now();
      if (left <= 0) {
        setText(this.message, `${denied}. A retry can succeed now.`);
        return;
      }
      setText(this.message, `${denied}: retry after ${(Math.ceil(left / 100) / 10).toFixed(1)} s.`);
      this.countdown = setTimeout(step, Math.min(COUNTDOWN_INTERVAL_MS, left));
    };
    step();
  }

  left({ limit, remaining }) {
    // A client without limits has null for both.
    const part = limit === null ? 1 : limit > 0 ? remaining / limit : 0;
    this.fill.style.setProperty("--part", part);
    this.meter.classList.toggle("empty", remaining === 0);
    this.meter.setAttribute("aria-valuemax", limit ?? 1);
    this.meter.setAttribute("aria-valuenow", remaining ?? 1);
    setText(this.remaining, limit === null ? "no limit" : `${count(remaining)} of ${count(limit)}`);
  }

  failed(detail) {
    this.release();
    clearTimeout(this.countdown);
    setText(this.message, detail);
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
