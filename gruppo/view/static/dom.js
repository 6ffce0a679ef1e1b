// Elements, and the only way in which text reaches the page: as text. Nothing here takes HTML.

const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "selected", "indeterminate"]);

/** An element with attributes, listeners (`onclick: …`) and children: nodes, texts, lists of them, or null. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** Put other children into a node. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** Put as many other children into a node, each in the place of its forerunner; the one that somebody uses stays until it is left. */
export function refill(node, make) {
  make().forEach((child, i) => {
    const before = node.children[i];
    if (!before.contains(document.activeElement)) before.replaceWith(child);
    else if (!waiting.has(before)) {
      waiting.add(before);
      before.addEventListener("focusout", () => setTimeout(() => { // by then it is known where the focus has gone
        waiting.delete(before);
        if (before.isConnected) refill(node, make);
      }), { once: true });
    }
  });
}
const waiting = new WeakSet();

// Characters that are not seen but change what is: controls (line breaks and tabs aside), marks of format and direction,
// joiners, fillers and selectors that leave no trace, blanks without ink. Within one emoji, joiners and the selector of its
// coloured form are a part of the picture: the first group takes it whole.
const EMOJI = String.raw`\p{Extended_Pictographic}\p{Emoji_Modifier}?\uFE0F?`;
const UNSEEN = new RegExp(
  String.raw`(${EMOJI}(?:\u200D${EMOJI})*|[0-9#*]\uFE0F\u20E3)|(?![\n\t])[\p{Cc}\p{Cf}\p{Default_Ignorable_Code_Point}\u2028\u2029\u2800]`, "gu");

/** Text with such characters by their code points: a completion cannot hide, reorder or end anything. */
export function visible(text) {
  return String(text).replace(UNSEEN, (found, emoji) => emoji ?? `⟦U+${found.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟧`);
}

/** Words of a model or a data set, apart from the rest of the page: in their own direction, as they are. */
export function words(text, attributes = {}) {
  return el("bdi", { dir: "auto", ...attributes, class: `words ${attributes.class ?? ""}` }, visible(text));
}

/** A number for people; a dash where there is none, also where a file from a stranger has something else. */
export function number(value, digits = 3) {
  if (typeof value !== "number" || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(digits - 1) : value.toFixed(digits);
}

export function percent(value) {
  return typeof value !== "number" ? "–" : `${(100 * value).toFixed(1)} %`;
}

/** A table with a caption (text, or a list of nodes) and scoped headers. Columns are [title, cell(row), "number" or nothing]. */
export function table(caption, columns, rows, attributes = {}) {
  const head = columns.map(([title, , kind]) => el("th", { scope: "col", class: kind }, title));
  const body = rows.map((row) => el("tr", {}, columns.map(([, cell, kind]) => el("td", { class: kind }, cell(row)))));
  const title = el("caption", {}, caption);
  const whole = el("table", attributes, title, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title.textContent }, whole);
}

/** A control under its name. */
export function field(title, control) {
  return el("label", { class: "field" }, el("span", {}, title), control);
}

/** A list to choose from; choices are [value, title]. */
export function choice(choices, value, onchange) {
  return el("select", { onchange: (event) => onchange(event.target.value) },
    choices.map(([own, title]) => el("option", { value: own, selected: String(own) === String(value) }, visible(title))));
}

/** A box to tick, with its name behind it. */
export function box(title, checked, onchange, attributes = {}) {
  const control = el("input", { type: "checkbox", checked, onchange: (event) => onchange(event.target.checked), ...attributes });
  return el("label", { class: "box" }, control, el("span", {}, title));
}

/** Calls a function at once, and when more calls follow, once they have been quiet for some milliseconds. */
export function calmly(milliseconds, work) {
  let timer = null;
  return (...values) => {
    if (timer === null) work(...values);
    else clearTimeout(timer.id);
    const due = timer === null ? null : () => work(...values);
    timer = { id: setTimeout(() => { timer = null; due?.(); }, milliseconds) };
  };
}

/** Links to the pages before and after this one of a long list. */
export function pager(total, first, count, go) {
  if (total <= count && first === 0) return null;
  const button = (title, to, enabled) => el("button", { type: "button", disabled: !enabled, onclick: () => go(to) }, title);
  return el("nav", { class: "pager", "aria-label": "Pages of the list" },
    button("Previous", Math.max(first - count, 0), first > 0),
    el("span", {}, `${number(Math.min(first + 1, total))} to ${number(Math.min(first + count, total))} of ${number(total)}`),
    button("Next", first + count, first + count < total));
}
