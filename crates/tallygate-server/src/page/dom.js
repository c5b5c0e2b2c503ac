// Creates elements without parsing markup: every value is inserted as text, so a name cannot inject HTML.

/**
 * Creates an element with properties and children. A property whose name starts with `on` is an event listener, a name with
 * a dash is an attribute, and `class` sets the class. Every other property is set on the element. A string child is text.
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

/** Sets the text of an element, and leaves the element alone if it already has that text. */
export function setText(element, text) {
  const next = String(text);
  if (element.textContent !== next) element.textContent = next;
}

export const byId = (id) => document.getElementById(id);

let ids = 0;
/** Returns an id that no other element has. */
export const newId = (prefix) => `${prefix}-${++ids}`;

/** Copies a text. If the browser does not allow it, selects the element that shows the text instead. Returns whether it copied. */
export async function copy(text, element) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return false;
  }
}

/** Creates a table from a caption, column names and rows of texts or nodes. A column name that starts with # aligns right. */
export function table(caption, columns, rows) {
  const isNumber = columns.map((column) => column.startsWith("#"));
  const cell = (tag, value, index) =>
    make(
      tag,
      {
        class: isNumber[index] ? "number" : undefined,
        scope: tag === "th" ? "col" : undefined,
        "data-column": tag === "td" ? columns[index].replace("#", "") : undefined,
      },
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
