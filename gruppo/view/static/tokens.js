// One completion token by token, coloured by a number of each.

import { ask } from "./api.js";
import { el, fill, number, pager, table, visible, words } from "./dom.js";

const NAMES = { logp: "log-prob", entropy: "entropy", ratio: "ratio", contribution: "advantage contribution" };
const COUNT = 4096, IN_TABLE = 500;

// How strong the colour of a value is, from -1 (cold) to 1 (hot); `most` is the largest size among the tokens.
const STRENGTH = {
  logp: (value) => Math.min(-value / 5, 1),
  entropy: (value) => Math.min(value / 3, 1),
  ratio: (value) => Math.max(-1, Math.min(Math.log(Math.max(value, 1e-9)) / Math.log(1.5), 1)),
  contribution: (value, most) => (most > 0 ? value / most : 0),
};
const LEGEND = {
  logp: ["likely (0)", "unlikely (−5 or less)"], entropy: ["sure (0)", "unsure (3 nats or more)"],
  ratio: ["1 / 1.5 or less", "1.5 or more"], contribution: ["pushed down", "pushed up"],
};
const BOTH_WAYS = new Set(["ratio", "contribution"]);

export function show(page) {
  const at = { run: page.run(), ...page.numbers("generation", "round", "row") };
  const body = el("div"), from = page.params.get("from");
  let first = 0, colouring = null;
  const load = async () => {
    const view = await ask("tokens", { ...at, first, count: COUNT });
    const usable = Object.keys(NAMES).filter((name) => view[name]);
    if (!usable.includes(colouring)) colouring = usable[0] ?? null;
    draw(view);
  };
  const draw = (view) => {
    const shown = tokenList(view);
    const legend = el("p", { class: "legend" });
    const paint = () => { shown.paint(colouring); fill(legend, ...legendOf(view, colouring)); };
    fill(body, around(page, at, view, from), choices(view, colouring, (name) => { colouring = name; paint(); }), legend,
      view.texts === null ? el("p", { class: "notice" }, "The folder of this run has no tokenizer.json, so tokens are shown by their ids.") : null,
      shown.readout, shown.node, pages(view), asTable(view));
    paint();
  };
  const pages = (view) => (view.total <= COUNT ? null : el("nav", { class: "pager", "aria-label": "Parts of the completion" },
    el("button", { type: "button", disabled: first === 0, onclick: () => { first -= COUNT; return load(); } }, "Previous"),
    el("span", {}, `Tokens ${number(first + 1)} to ${number(Math.min(first + COUNT, view.total))} of ${number(view.total)}`),
    el("button", { type: "button", disabled: first + COUNT >= view.total, onclick: () => { first += COUNT; return load(); } }, "Next")));
  const node = el("section", {}, el("h2", { tabindex: "-1" }, `Completion ${at.row} of generation ${at.generation}, token by token`), body);
  return { node, ready: load };
}

/** The way to the group of a completion, and to those beside it. */
function around(page, at, view, from) {
  const { row, ...place } = at, here = view.rows.indexOf(row);
  const beside = (by, title) => (view.rows[here + by] === undefined ? null
    : el("a", { href: page.link("tokens", { ...place, row: view.rows[here + by], from }) }, title));
  return el("nav", { class: "pager", "aria-label": "The group of this completion" },
    el("a", { href: page.link("group", { ...place, group: view.group, from }) }, `Group ${view.group}`),
    beside(-1, "‹ Previous completion"), el("span", {}, `${number(here + 1)} of ${number(view.rows.length)}`), beside(1, "Next completion ›"));
}

function choices(view, chosen, changed) {
  return el("fieldset", { class: "row" }, el("legend", {}, "Coloured by"), Object.entries(NAMES).map(([name, title]) => {
    const why = view.why[name] ?? null;
    const control = el("input", { type: "radio", name: "colouring", value: name, checked: name === chosen, disabled: why !== null, onchange: () => changed(name) });
    return el("label", { class: "box", title: why ?? view.means[name] }, control,
      el("span", {}, title, why === null ? null : el("small", {}, ` – ${why}`)));
  }));
}

function legendOf(view, name) {
  if (name === null) return ["There is nothing to colour these tokens by."];
  const [low, high] = LEGEND[name];
  const suffix = (name === "ratio" || name === "contribution") && view.update !== null ? ` (update ${view.update})` : "";
  return [el("span", { class: `swatch ${BOTH_WAYS.has(name) ? "cold" : "none"}` }), ` ${low} `, el("span", { class: "swatch hot" }), ` ${high}. `,
    el("span", { class: "quiet" }, view.means[name] + suffix)];
}

const textOf = (view, i) => (view.texts === null ? `#${view.ids[i]} ` : view.texts[i]);

/** What is known about a token, in words. */
function describe(view, i) {
  const values = Object.entries(NAMES).filter(([name]) => view[name]).map(([name, title]) => `${title} ${number(view[name][i], 4)}`);
  const who = view.model[i] ? values.join(", ") : "not written by the model";
  return [`Token ${view.first + i}, `, words(JSON.stringify(visible(textOf(view, i)))), `, id ${view.ids[i]}: ${who}`];
}

/** The tokens as text; those of tools folded. Arrow keys go from one to the next. */
function tokenList(view) {
  const readout = el("p", { class: "token-readout", role: "status" }, "Point at a token, or go through them with the arrow keys.");
  const spans = view.ids.map((_, i) => {
    const text = textOf(view, i);
    const own = el("span", { class: "token", "data-i": i }, text === "" ? "·" : visible(text).replaceAll("\n", "⏎\n"));
    return own;
  });
  const node = el("div", { class: "tokens", tabindex: "0", role: "application", "aria-label": "Tokens; arrow keys go from one to the next" });
  for (let i = 0; i < spans.length;) {
    let end = i;
    while (end < spans.length && view.model[end] === view.model[i]) end += 1;
    const run = spans.slice(i, end);
    node.append(view.model[i] ? el("span", { dir: "auto", class: "spoken" }, run)
      : el("details", { class: "turn tool" }, el("summary", {}, `Tool or environment: ${number(end - i)} tokens`), run));
    i = end;
  }
  let current = -1;
  const focus = (i) => {
    if (i < 0 || i >= spans.length) return;
    spans[current]?.classList.remove("current");
    current = i;
    spans[i].classList.add("current");
    spans[i].scrollIntoView({ block: "nearest" });
    fill(readout, describe(view, i));
  };
  const unfolded = (i, by) => { // tokens of a folded turn are passed over
    let next = i + by;
    while (spans[next] && spans[next].closest("details:not([open])")) next += by;
    return next;
  };
  const moved = (by) => {
    let i = current;
    for (let left = Math.abs(by); left > 0 && spans[unfolded(i, Math.sign(by))]; left -= 1) i = unfolded(i, Math.sign(by));
    return i;
  };
  node.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (by === undefined || event.target !== node) return;
    event.preventDefault();
    focus(moved(by));
  });
  node.addEventListener("pointerover", (event) => {
    const own = event.target.closest?.(".token");
    if (own) fill(readout, describe(view, Number(own.dataset.i)));
  });
  const paint = (name) => {
    const known = name === null ? [] : view[name].filter((value) => value !== null);
    const most = known.reduce((size, value) => Math.max(size, Math.abs(value)), 0);
    spans.forEach((span, i) => {
      const value = name === null ? null : view[name][i];
      const strength = value === null ? 0 : STRENGTH[name](value, most);
      span.classList.toggle("hot", strength > 0);
      span.classList.toggle("cold", strength < 0);
      span.style.setProperty("--strength", Math.abs(strength).toFixed(2));
    });
  };
  return { node, readout, paint };
}

function asTable(view) {
  const columns = [
    ["Position", (i) => number(view.first + i), "number"], ["Text", (i) => visible(JSON.stringify(textOf(view, i)))], ["Id", (i) => String(view.ids[i]), "number"],
    ["Written by", (i) => (view.model[i] ? "the model" : "a tool")],
    ...Object.entries(NAMES).filter(([name]) => view[name]).map(([name, title]) => [title, (i) => number(view[name][i], 4), "number"]),
  ];
  const place = el("div");
  const draw = (from) => {
    const rows = view.ids.map((_, i) => i).slice(from, from + IN_TABLE);
    const caption = `Positions ${number(view.first + from)} to ${number(view.first + from + rows.length - 1)} of ${number(view.total)} tokens`;
    fill(place, table(caption, columns, rows, { id: "token-table" }), pager(view.ids.length, from, IN_TABLE, draw));
  };
  const details = el("details", { ontoggle: () => details.open && view.ids.length > 0 && place.children.length === 0 && draw(0) },
    el("summary", {}, "As a table"), place);
  return details;
}
