// Clients: real decisions of the running server, and what each client has left.
//
// Sending is `POST /v1/check`, one request each; what is left is looked at by `POST /v1/peek`, which charges nobody,
// and only while this is seen.

import { get, post, postWhole } from "./api.js";
import { byId, make, newId, tell } from "./dom.js";
import { count } from "./units.js";

const LOOK_EVERY_MS = 200;
const HELD_EVERY_MS = 50;
const REMEMBERED = 60;

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
    this.cost = make("input", { id: costId, name: "cost", type: "number", min: 1, max: 1_000_000, value: 1 });
    this.list = make("ul", { class: "cards" });
    const name = make("input", {
      type: "text",
      name: "new-client",
      placeholder: "Another client",
      "aria-label": "Name of another client",
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
    this.replyHead = make("p", { class: "status" }, "Nothing was sent yet.");
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
          { class: "reply", "aria-label": "The last reply" },
          make("h2", {}, "The last reply"),
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
    this.look();
  }

  hidden() {
    this.isVisible = false;
    clearTimeout(this.looking);
    for (const client of this.clients) client.release();
  }

  /** Asks which policies there are; whoever may not know writes a name. */
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
    tell(this.rule, (tier ?? policy)?.rule ?? "");
    // A name that was written may be wrong: nobody asks about it until a request went through.
    this.isKnown = policy !== undefined;
  }

  question(client, cost) {
    const policy = this.policies ? this.policyList.value : this.policyName.value;
    const tier = this.tier.value;
    return { policy, key: client.key(), cost, ...(tier ? { tier } : {}) };
  }

  async send(client) {
    const question = this.question(client, Number(this.cost.value) || 1);
    let reply;
    try {
      reply = await postWhole("v1/check?headers=all", question);
    } catch {
      client.failed("the server does not answer");
      return;
    }
    this.show(reply);
    const told = parsed(reply.text);
    if (!reply.ok) {
      client.failed(told?.detail ?? `the server said ${reply.status}`);
      return;
    }
    this.isKnown = true;
    client.decided(told);
  }

  show({ status, fields, text }) {
    tell(this.replyHead, `HTTP ${status}`);
    this.replyFields.replaceChildren(
      ...fields.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]),
    );
    const told = parsed(text);
    tell(this.replyBody, told ? JSON.stringify(told, null, 2) : text);
  }

  async look() {
    clearTimeout(this.looking);
    const looked = this.clients.slice();
    if (this.isKnown && looked.length > 0 && document.visibilityState === "visible") {
      try {
        const { results } = await post("v1/peek", {
          checks: looked.map((client) => this.question(client, 0)),
        });
        looked.forEach((client, index) => client.left(results[index]));
      } catch {
        // The next send says what is wrong.
        this.isKnown = false;
      }
    }
    if (this.isVisible) this.looking = setTimeout(() => this.look(), LOOK_EVERY_MS);
  }
}

/** A client: its name, its buttons, what it has left, and what it was told. */
class Client {
  constructor(name, send, remove) {
    this.send = () => send(this);
    this.allowed = 0;
    this.refused = 0;
    this.name = make("input", {
      class: "client-name",
      type: "text",
      value: name,
      "aria-label": "Client's name",
      spellcheck: false,
    });
    this.fill = make("div", { class: "fill" });
    this.meter = make(
      "div",
      { class: "meter", role: "meter", "aria-label": "Left", "aria-valuemin": "0" },
      this.fill,
    );
    this.remaining = make("output", { class: "left" }, "–");
    this.counts = make("output", { class: "counts" }, "0 allowed, 0 refused");
    this.history = make("ol", { class: "history", "aria-label": "Decisions" });
    this.told = make("p", { class: "told" });
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
      "Hold",
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
          { type: "button", onclick: () => Promise.all(Array.from({ length: 10 }, () => this.send())) },
          "Send 10",
        ),
        hold,
        this.counts,
      ),
      this.history,
      this.told,
    );
  }

  key() {
    return this.name.value;
  }

  async hold() {
    if (this.isHeld) return;
    this.isHeld = true;
    while (this.isHeld) {
      await Promise.all([this.send(), new Promise((done) => setTimeout(done, HELD_EVERY_MS))]);
    }
  }

  release() {
    this.isHeld = false;
  }

  decided(decision) {
    if (decision.allowed) this.allowed += 1;
    else this.refused += 1;
    tell(this.counts, `${count(this.allowed)} allowed, ${count(this.refused)} refused`);
    this.history.append(
      make("li", {
        class: `key ${decision.allowed ? "allowed" : "refused"}`,
        title: decision.allowed ? "allowed" : "refused",
      }),
    );
    while (this.history.children.length > REMEMBERED) this.history.firstChild.remove();
    const retry =
      decision.retry_after_ms === null
        ? "it can never fit"
        : `retry after ${count(decision.retry_after_ms)} ms`;
    tell(
      this.told,
      decision.allowed ? "" : `Refused${decision.refused_by ? ` by ${decision.refused_by}` : ""}: ${retry}.`,
    );
    this.left(decision);
  }

  left({ limit, remaining }) {
    const part = limit > 0 ? remaining / limit : 0;
    this.fill.style.setProperty("--part", part);
    this.meter.classList.toggle("empty", remaining === 0);
    this.meter.setAttribute("aria-valuemax", limit);
    this.meter.setAttribute("aria-valuenow", remaining);
    tell(this.remaining, `${count(remaining)} of ${count(limit)}`);
  }

  failed(detail) {
    this.release();
    tell(this.told, detail);
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
