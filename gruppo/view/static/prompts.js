// Prompts over the course of training: the hardest, the solved, and one of them from update to update.

import { ask, asker } from "./api.js";
import { chart } from "./charts.js";
import { calmly, choice, el, field, fill, number, pager, percent, refill, table, words } from "./dom.js";
import { passing, passingFields, readPassing } from "./passing.js";

const ORDERS = [
  ["hardest", "hardest first"], ["solved", "solved first"], ["improved", "improved most"], ["worsened", "worsened most"], ["times", "sampled most often"],
];
const COUNT = 50;

export function show(page) {
  readPassing(page.params);
  const asked = {
    run: page.run(), split: page.params.get("split") ?? "train", order: page.params.get("order") ?? "hardest",
    search: page.params.get("search") ?? "", first: Number(page.params.get("first") ?? 0),
  };
  const question = asker("prompts");
  const results = el("div", { "aria-live": "polite" }), tools = el("div", { class: "tools" });
  const changed = (part) => { Object.assign(asked, { first: 0 }, part); return load(); };
  const controls = () => {
    const run = page.overview.runs[asked.run], splits = Object.keys(run.splits);
    if (!splits.includes(asked.split)) asked.split = splits[0] ?? "";
    return [
      page.runField(asked.run, (value) => { asked.run = value; fill(tools, controls()); changed({}); }),
      field("Split", choice(splits.map((name) => [name, name]), asked.split, (value) => changed({ split: value }))),
      field("Sort by", choice(ORDERS, asked.order, (value) => changed({ order: value }))),
      field("Search", el("input", { type: "search", value: asked.search, oninput: calmly(120, (event) => changed({ search: event.target.value })) })),
      passingFields(run, () => changed({})),
    ];
  };
  let listing = null; // what is listed, as text
  const load = async () => {
    page.remember({ ...asked, ...passing() });
    const answer = await question({ ...asked, count: COUNT, ...passing() });
    const before = listing;
    if (answer === null || (listing = JSON.stringify([asked, answer])) === before) return;
    const link = (each) => el("a", { href: page.link("prompt", { run: asked.run, prompt_id: each.prompt_id }) }, words(each.prompt || "(an empty prompt)"));
    fill(results,
      el("p", {}, `${number(answer.solved)} prompts are solved: every completion of their last group is right. ${number(answer.never)} were never solved.`),
      table(`${number(answer.total)} prompts`, [
        ["Prompt", link], ["Groups", (each) => number(each.times), "number"], ["First", (each) => percent(each.first), "number"],
        ["Last", (each) => percent(each.last), "number"], ["All", (each) => percent(each.rate), "number"],
        ["Change", (each) => `${each.change >= 0 ? "+" : "−"}${(100 * Math.abs(each.change)).toFixed(1)}`, "number"],
      ], answer.prompts, { id: "prompts" }),
      pager(answer.total, answer.first, COUNT, (first) => changed({ first })));
  };
  fill(tools, controls());
  const rolloutsChanged = () => { refill(tools, controls); return load(); };
  return { node: el("section", {}, el("h2", { tabindex: "-1" }, "Prompts"), tools, results), ready: load, rolloutsChanged };
}

export function showOne(page) {
  readPassing(page.params);
  const run = page.run(), names = page.overview.runs.map((each) => each.name);
  const body = el("div");
  const plot = chart("Pass rate", names, { height: 220, range: [-0.03, 1.03] });
  const load = async () => {
    const answer = await ask("prompt", { run, prompt_id: page.params.get("prompt_id"), ...passing() });
    const link = (each) => el("a", { href: page.link("group", { run, generation: each.generation, round: each.round, group: each.group }) }, `update ${each.update}`);
    fill(body, el("div", { class: "parts" }, words(answer.prompt, { class: "text" })),
      passingFields(page.overview.runs[run], load), plot.figure,
      table("Its groups", [
        ["Sampled after", link], ["Split", (each) => words(each.split)], ["Pass rate", (each) => percent(each.accuracy), "number"],
        ["Reward", (each) => number(each.reward), "number"], ["Spread", (each) => number(each.spread), "number"],
        ["Tokens", (each) => number(Math.round(each.length)), "number"], ["Size", (each) => number(each.size), "number"],
      ], answer.history, { id: "history" }));
    plot.draw([{ run, name: "pass rate", updates: answer.history.map((each) => each.update), values: answer.history.map((each) => each.accuracy) }]);
  };
  const rolloutsChanged = () => (body.contains(document.activeElement) ? null : load());
  return { node: el("section", {}, el("h2", { tabindex: "-1" }, "One prompt over training"), body), ready: load, rolloutsChanged };
}
