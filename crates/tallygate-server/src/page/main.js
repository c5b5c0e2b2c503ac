// The page: its tabs, its address, and `window.tallygate`, through which tests read the plotted data.
//
// The address is `#TAB?QUERY`. The query contains the scenario and the explained decision.

import { Backtest } from "./backtest.js";
import { Clients } from "./clients.js";
import { Compare } from "./compare.js";
import { byId } from "./dom.js";
import { Explain } from "./explain.js";
import { Live } from "./live.js";

const tabs = [...document.querySelectorAll("[role=tab]")];
const nameOf = (tab) => tab.id.replace("tab-", "");
let open = null;

const explain = new Explain(() => address());
const compare = new Compare(
  (algorithm, event) => {
    explain.choose(algorithm, event);
    show("explain");
    explain.verdict.focus({ preventScroll: true });
  },
  () => address(),
);
compare.onshown = (reply) => explain.take(reply);
const views = { compare, explain, clients: new Clients(), live: new Live(), backtest: new Backtest() };

function show(name) {
  if (open === name) return;
  if (open) views[open].hidden?.();
  open = name;
  for (const tab of tabs) {
    const isOpen = nameOf(tab) === name;
    tab.setAttribute("aria-selected", isOpen);
    tab.tabIndex = isOpen ? 0 : -1;
    byId(`panel-${nameOf(tab)}`).hidden = !isOpen;
  }
  document.title = `${tabs.find((tab) => nameOf(tab) === name).textContent} · Tallygate`;
  views[name].shown?.();
  address();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => show(nameOf(tab)));
  tab.addEventListener("keydown", (event) => {
    const here = tabs.indexOf(tab);
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = tabs[(to + tabs.length) % tabs.length];
    next.focus();
    show(nameOf(next));
  });
}

function address() {
  const query = [compare.query(), open === "explain" ? explain.query() : ""].filter(Boolean).join("&");
  const hash = `#${open}${query ? `?${query}` : ""}`;
  if (location.hash !== hash) history.replaceState(null, "", hash);
}

function read() {
  const [, tab = "", , query = ""] = /^#?([a-z]*)(\?(.*))?$/.exec(location.hash) ?? [];
  explain.address(query);
  compare.take(query);
  show(tab in views ? tab : "compare");
}
addEventListener("hashchange", read);

document.addEventListener("theme", () => {
  for (const view of Object.values(views)) view.redraw?.();
});

/**
 * The contents of the page, for tests: `plotted()` returns the data of the plots of every lane, `scenario()` the scenario,
 * `explained()` the shown arithmetic, and `redraws()` the milliseconds from each change until it was drawn.
 */
window.tallygate = {
  plotted: () => compare.plotted(),
  scenario: () => compare.scenario,
  explained: () => explain.explanation ?? null,
  redraws: () => [...compare.redraws],
};

read();
