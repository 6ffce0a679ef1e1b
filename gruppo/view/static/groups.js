// Groups of an update or of all: sorted, filtered, searched.

import { asker, query } from "./api.js";
import { box, calmly, choice, el, field, fill, number, pager, percent, refill, table, visible, words } from "./dom.js";
import { passing, passingFields, readPassing } from "./passing.js";

const ORDERS = [["spread", "spread of rewards"], ["accuracy", "accuracy"], ["length", "length"], ["reward", "reward"], ["update", "time"]];
const FILTERS = {
  zero_spread: "zero spread", truncated: "truncated completions", tool_failures: "failed tool calls",
  reward_failures: "failed rewards", disagreement: "rewards that disagree", replaced: "replaced by dynamic sampling",
};
const COUNT = 50;

export function show(page) {
  readPassing(page.params);
  const asked = {
    run: page.run(), split: page.params.get("split") ?? "", update: (page.params.get("update") ?? "newest").replace(/^all$/, ""),
    order: page.params.get("order") ?? "spread", descending: page.params.get("descending") !== "0",
    filter: page.params.getAll("filter"), search: page.params.get("search") ?? "", first: Number(page.params.get("first") ?? 0),
  };
  const question = asker("groups");
  const results = el("div", { "aria-live": "polite", "aria-busy": "true" });
  const tools = el("div", { class: "tools" });
  const run = () => page.overview.runs[asked.run];
  const updates = () => run().splits[asked.split] ?? [];

  const settle = () => {
    const splits = Object.keys(run().splits);
    if (!splits.includes(asked.split)) asked.split = splits[0] ?? "";
  };
  const changed = (part, again = false) => {
    Object.assign(asked, { first: 0 }, part);
    if (again) fill(tools, controls());
    return load();
  };

  const controls = () => {
    settle();
    const newest = updates().at(-1);
    const here = () => updates().indexOf(asked.update === "newest" ? updates().at(-1) : Number(asked.update));
    const move = (by) => changed({ update: String(updates()[here() + by]) }, true);
    const place = here();
    return [
      page.runField(asked.run, (value) => changed({ run: value, update: "newest" }, true)),
      field("Split", choice(Object.keys(run().splits).map((name) => [name, name]), asked.split, (value) => changed({ split: value, update: "newest" }, true))),
      el("div", { class: "row", role: "group", "aria-label": "Update" },
        el("button", { type: "button", disabled: asked.update === "" || place <= 0, onclick: () => move(-1), "aria-label": "Earlier update" }, "‹"),
        field("Sampled after update", choice([["newest", `newest (${newest ?? "none yet"})`], ["", "all of them"], ...updates().map((n) => [n, n])],
          asked.update, (value) => changed({ update: value }, true))),
        el("button", { type: "button", disabled: asked.update === "" || place < 0 || place >= updates().length - 1, onclick: () => move(1), "aria-label": "Later update" }, "›")),
      field("Sort by", choice(ORDERS, asked.order, (value) => changed({ order: value }))),
      field("Order", choice([["1", "highest first"], ["0", "lowest first"]], asked.descending ? "1" : "0", (value) => changed({ descending: value === "1" }))),
      field("Search in prompts and completions", el("input", { type: "search", id: "search", value: asked.search, oninput: calmly(120, (event) => changed({ search: event.target.value })) })),
      el("fieldset", {}, el("legend", {}, "Only groups with"), Object.entries(FILTERS).map(([name, title]) =>
        box(title, asked.filter.includes(name), (on) => changed({ filter: on ? [...asked.filter, name] : asked.filter.filter((each) => each !== name) }),
          { title: page.overview.filters[name], name }))),
      passingFields(run(), () => changed({})),
    ];
  };

  let listing = null; // what is listed, as text
  const load = async () => {
    results.setAttribute("aria-busy", "true");
    page.remember(address(asked));
    const update = asked.update === "newest" ? updates().at(-1) : asked.update;
    const answer = await question({ ...asked, update, count: COUNT, ...passing() });
    if (answer === null) return;
    const before = listing;
    listing = JSON.stringify([address(asked), answer]);
    if (listing !== before) fill(results, listed(page, asked, answer), pager(answer.total, answer.first, COUNT, (first) => changed({ first })));
    results.setAttribute("aria-busy", "false");
  };

  const node = el("section", {}, el("h2", { tabindex: "-1" }, "Groups"), tools, results);
  fill(tools, controls());
  return {
    node, ready: load,
    rolloutsChanged: () => {
      refill(tools, controls);
      return load();
    },
  };
}

/** What the address of a list says; its groups and their tokens carry it, for the way back. */
const address = (asked) => ({ ...asked, update: asked.update || "all", descending: asked.descending ? "1" : "0", ...passing() });

function listed(page, asked, answer) {
  if (answer.total === 0) return el("p", {}, "No group matches.");
  const flags = (group) => Object.entries(FILTERS).filter(([name]) => Number(group[name]) > 0)
    .map(([, title]) => el("span", { class: "flag" }, title));
  const from = query(address(asked)).toString();
  const link = (group) => el("a", { href: page.link("group", { run: asked.run, generation: group.generation, round: group.round, group: group.group, from }) },
    words(group.prompt || "(an empty prompt)"));
  const columns = [
    ["Prompt", link],
    ["Update", (group) => number(group.update), "number"],
    ["Accuracy", (group) => percent(group.accuracy), "number"],
    ["Reward", (group) => number(group.reward), "number"],
    ["Spread", (group) => number(group.spread), "number"],
    ["Lowest to highest", (group) => `${number(group.lowest)} to ${number(group.highest)}`, "number"],
    ["Tokens", (group) => number(Math.round(group.length)), "number"],
    ["Size", (group) => number(group.size), "number"],
    ...(asked.search ? [["Found in", (group) => visible(group.hits ?? 0), "number"]] : []),
    ["Notes", flags],
  ];
  return table(`${number(answer.total)} groups, ${number(answer.completions)} completions`, columns, answer.groups, { id: "groups" });
}
