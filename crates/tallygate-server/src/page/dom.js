// Elements, made without markup: whatever is shown is text, so a name is never anything else.

/**
 * An element with its properties and children. Properties that begin with `on` are listeners, those with a dash are
 * attributes, `class` is the class; everything else is set on the element itself. A child that is no node is text.
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name.includes("-") || name === "role" || name === "for" || name === "list")
      element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Puts a text where another one is, if it is another. */
export function tell(element, text) {
  const told = String(text);
  if (element.textContent !== told) element.textContent = told;
}

export const byId = (id) => document.getElementById(id);

let made = 0;
/** An id that no other element has. */
export const newId = (of) => `${of}-${++made}`;

/** Copies a text; where the browser refuses, selects it. */
export async function copy(text, shown) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(shown);
    return false;
  }
}

/** A table with a caption, column names and rows of texts or nodes; a column is a number's if its name begins with #. */
export function table(caption, columns, rows) {
  const isNumber = columns.map((column) => column.startsWith("#"));
  const cell = (tag, value, index) =>
    make(
      tag,
      { class: isNumber[index] ? "number" : undefined, scope: tag === "th" ? "col" : undefined },
      value,
    );
  return make(
    "table",
    {},
    make("caption", {}, caption),
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        columns.map((column, index) => cell("th", column.replace("#", ""), index)),
      ),
    ),
    make(
      "tbody",
      {},
      rows.map((row) =>
        make(
          "tr",
          {},
          row.map((value, index) => cell("td", value ?? "–", index)),
        ),
      ),
    ),
  );
}
