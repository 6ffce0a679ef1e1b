// One group: its prompt, and its completions side by side.

import { ask } from "./api.js";
import { choice, el, field, fill, number, percent, words } from "./dom.js";
import { passing, passingFields } from "./passing.js";

const ORDERS = [["reward", "reward"], ["advantage", "advantage"], ["length", "length"], ["row", "place in the batch"]];

export function show(page) {
  const place = { run: page.run(), ...page.numbers("generation", "round", "group") }, from = page.params.get("from");
  const body = el("div");
  let order = "reward";
  const load = async () => {
    const group = await ask("group", { ...place, ...passing() });
    const draw = () => fill(body, facts(page, place, group), passingFields(page.overview.runs[place.run], load),
      el("h3", {}, "Prompt"), parts(group.prompt),
      el("h3", {}, "Completions"),
      field("Sort by", choice(ORDERS, order, (value) => { order = value; draw(); })),
      el("div", { class: "cards", role: "list", "aria-label": "Completions side by side" },
        sorted(group.completions, order).map((each) => card(page, place, each, from))));
    draw();
  };
  const title = `Group ${place.group} of generation ${place.generation}`;
  const back = el("p", {}, el("a", { href: from === null ? page.link("groups", { run: place.run }) : `#groups?${from}` }, "‹ Back to the list of groups"));
  return { node: el("section", {}, back, el("h2", { tabindex: "-1" }, title), body), ready: load };
}

function sorted(completions, order) {
  const key = (each) => (order === "row" ? -each.row : each[order] ?? -Infinity);
  return [...completions].sort((a, b) => key(b) - key(a));
}

function facts(page, place, group) {
  const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
  return el("dl", { class: "facts" },
    fact("sampled after update", number(group.update)), fact("split", words(group.split)), fact("accuracy", percent(group.accuracy)),
    fact("reward", number(group.reward)), fact("spread", number(group.spread)), fact("tokens", number(Math.round(group.length))),
    group.replaced ? fact("replaced", "by dynamic sampling; nothing was learned from it") : null,
    fact("over training", el("a", { href: page.link("prompt", { run: place.run, prompt_id: group.prompt_id }) }, "this prompt's history")));
}

/** Texts with the roles of who wrote them; what a tool wrote is folded. */
export function parts(content, more = null) {
  const text = (part) => el("div", { class: "text" }, words(part.text));
  const shown = content.parts.map((part) => {
    if (part.role === null) return text(part);
    const role = el("span", { class: "role" }, words(part.role), part.failed ? el("span", { class: "flag bad" }, "failed") : null);
    if (part.role === "tool") return el("details", { class: "turn tool" }, el("summary", {}, role), text(part));
    return el("div", { class: "turn" }, role, text(part));
  });
  return el("div", { class: "parts", tabindex: "0", role: "region", "aria-label": "Text" }, shown,
    content.cut && more !== null ? el("p", {}, `The first part of ${number(content.characters)} characters. `, more) : null,
    content.cut && more === null ? el("p", { class: "quiet" }, `The first part of ${number(content.characters)} characters.`) : null);
}

function card(page, place, each, from) {
  const at = { run: place.run, generation: place.generation, round: place.round, row: each.row };
  const text = el("div");
  const whole = el("button", { type: "button", onclick: async () => fill(text, parts(await ask("text", at))) }, "Show all of it");
  fill(text, parts(each.content, whole));
  const rewards = Object.entries(each.rewards).map(([name, value]) => [el("dt", {}, words(name)),
    el("dd", {}, number(value), each.kinds[name] ? [" (", words(each.kinds[name]), ")"] : null)]);
  return el("article", { class: `card ${each.passes ? "right" : "wrong"}`, role: "listitem", "aria-label": `Completion ${each.row}, reward ${number(each.reward)}` },
    el("header", {},
      el("strong", {}, `${each.passes ? "✓ right" : "✗ not right"}`),
      each.truncated ? el("span", { class: "flag bad" }, "truncated: ", words(each.stop)) : null,
      each.turns > 1 ? el("span", { class: "flag" }, `${each.turns} turns`) : null,
      el("a", { href: page.link("tokens", { ...at, from }) }, "tokens")),
    el("dl", { class: "facts small" },
      el("dt", {}, "reward"), el("dd", {}, number(each.reward)), el("dt", {}, "advantage"), el("dd", {}, number(each.advantage)), rewards,
      el("dt", {}, "tokens"), el("dd", {}, number(each.length))),
    text,
    each.extra ? el("details", {}, el("summary", {}, "Logged columns"), words(each.extra, { class: "text" })) : null);
}
