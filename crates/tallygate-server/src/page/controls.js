// The controls of a scenario: a slider and a field per number, and the list of patterns.

import { make, newId, setText } from "./dom.js";
import { CHOICES, NUMBERS, PATTERNS, applies, changed, read } from "./scenario.js";

/** Fills a form with the controls. Calls `onchange` with each new scenario. */
export function controls(form, scenario, onchange) {
  let now = scenario;
  const change = (next) => {
    now = next;
    show();
    onchange(now);
  };

  const about = make("p", { class: "about", id: newId("about") });
  const pattern = make(
    "select",
    {
      id: newId("pattern"),
      name: "pattern",
      "aria-describedby": about.id,
      onchange: () => change({ ...now, pattern: pattern.value }),
    },
    PATTERNS.map(([name, label]) => make("option", { value: name }, label)),
  );
  const rows = [
    ...NUMBERS.map((field) => number(field, () => now, change)),
    ...CHOICES.map((field) => choice(field, () => now, change)),
  ];
  form.replaceChildren(
    make("div", { class: "field" }, make("label", { for: pattern.id }, "Traffic"), pattern, about),
    ...rows.map((row) => row.element),
  );
  form.addEventListener("submit", (event) => event.preventDefault());

  function show() {
    pattern.value = now.pattern;
    setText(about, PATTERNS.find(([name]) => name === now.pattern)[2]);
    for (const row of rows) row.show();
  }
  show();

  return {
    /** Shows another scenario without calling `onchange`. */
    set(scenario) {
      now = scenario;
      show();
    },
  };
}

function number(field, scenario, change) {
  const scale = field.scale ?? 1;
  const id = newId(field.name);
  const given = (input) => {
    const value = Math.round(Number(input.value) * scale);
    if (input.value !== "" && input.validity.valid && Number.isSafeInteger(value)) {
      change(changed(scenario(), field, value));
    }
  };
  const slider = make("input", {
    type: "range",
    id,
    name: field.name,
    min: field.min,
    max: field.max,
    step: field.step ?? 1,
    oninput: () => given(slider),
  });
  const exact = make("input", {
    type: "number",
    name: `${field.name}-exact`,
    min: 1 / scale,
    max: field.most,
    step: scale > 1 ? 1 / scale : 1,
    "aria-label": `${field.label}, exactly`,
    oninput: () => given(exact),
    onblur: () => show(),
  });
  const element = make(
    "div",
    { class: "field number" },
    make(
      "label",
      { for: id },
      field.label,
      make("span", { class: "hint" }, ` ${field.unit || (field.hint ?? "")}`),
    ),
    exact,
    slider,
  );

  function show() {
    element.hidden = !applies(scenario(), field);
    const value = read(scenario(), field) / scale;
    // Do not overwrite a number while the user types it.
    if (document.activeElement !== exact || Number(exact.value) !== value) exact.value = value;
    slider.value = value;
    slider.setAttribute("aria-valuetext", `${value} ${field.unit}`.trim());
  }
  return { element, show };
}

function choice(field, scenario, change) {
  const box = make("input", {
    type: "checkbox",
    name: field.name,
    onchange: () => change(changed(scenario(), field, box.checked)),
  });
  const element = make("div", { class: "field choice" }, make("label", {}, box, ` ${field.label}`));
  return {
    element,
    show() {
      element.hidden = !applies(scenario(), field);
      box.checked = read(scenario(), field);
    },
  };
}
