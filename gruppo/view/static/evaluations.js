// Results of evaluations, and two of them on the same problems.

import { ask } from "./api.js";
import { choice, el, field, fill, number, percent, table, words } from "./dom.js";

const FEW = 100;

export function show(page) {
  const all = page.overview.evaluations;
  const rows = all.flatMap((evaluation) => Object.entries(evaluation.benchmarks).flatMap(([benchmark, found]) =>
    ["greedy", "sampled"].filter((pass) => found?.[pass]).map((pass) => ({ evaluation, benchmark, pass, numbers: found[pass] }))));
  const interval = ({ numbers }) => (Array.isArray(numbers.interval) ? numbers.interval.map(percent).join(" to ") : "–");
  const results = rows.length === 0
    ? el("p", {}, "There is no evaluation among these folders. `gruppo eval` creates one; name its folder too: ", el("code", {}, "gruppo view RUN evaluations"))
    : table("Results", [
      ["Evaluation", (row) => words(row.evaluation.name)], ["Benchmark", (row) => words(row.benchmark)],
      ["Pass", (row) => (row.pass === "greedy" ? "greedy, top-1" : `sampled, avg@${number(row.numbers.avg?.k ?? null)}`.replace("@–", "@k"))],
      ["Accuracy", (row) => percent(row.numbers.accuracy), "number"], ["95 %", interval, "number"],
      ["Problems", (row) => number(row.numbers.problems), "number"], ["Truncated", (row) => percent(row.numbers.truncation_rate), "number"],
      ["Tokens", (row) => number(row.numbers.mean_tokens, 0), "number"],
    ], rows, { id: "results" });
  const comparison = compared(page, all);
  const problems = all.filter((each) => each.problem).map((each) => el("p", { class: "notice" }, words(each.problem)));
  return { node: el("section", {}, el("h2", { tabindex: "-1" }, "Evaluations"), problems, results, comparison.node), ready: comparison.load };
}

const keyOf = ({ benchmark, pass }) => `${benchmark} ${pass}`;

function compared(page, all) {
  const body = el("div", { "aria-live": "polite" }), tools = el("div", { class: "tools" });
  if (all.length < 2) return { node: el("div"), load: () => {} };
  const asked = {
    first: Number(page.params.get("first") ?? 0), second: Number(page.params.get("second") ?? 1),
    what: page.params.get("what") ?? "", which: page.params.get("which") ?? "differ",
  };
  const shared = () => {
    const theirs = new Set(all[asked.second].passes.map(keyOf));
    return all[asked.first].passes.filter((each) => theirs.has(keyOf(each)));
  };
  const changed = (part) => { Object.assign(asked, part); return load(); };
  const load = async () => {
    const both = shared(), names = all.map((each, i) => [i, each.name]);
    const chosen = both.find((each) => keyOf(each) === asked.what) ?? both[0];
    page.remember(asked);
    fill(tools, field("First", choice(names, asked.first, (value) => changed({ first: Number(value) }))),
      field("Second", choice(names, asked.second, (value) => changed({ second: Number(value) }))),
      field("Benchmark", choice(both.map((each) => [keyOf(each), `${each.benchmark}, ${each.pass}`]), chosen && keyOf(chosen), (value) => changed({ what: value }))),
      field("Problems", choice([["differ", "that differ"], ["lost", "worse in the second"], ["won", "better in the second"], ["all", "all"]], asked.which, (value) => changed({ which: value }))));
    if (chosen === undefined) return fill(body, el("p", {}, "These two have no benchmark in common."));
    const answer = await ask("compare", { first: asked.first, second: asked.second, benchmark: chosen.benchmark, pass: chosen.pass });
    return fill(body, verdict(answer), problems(page, asked, chosen, answer));
  };
  return { node: el("div", {}, el("h3", {}, "Two checkpoints on the same problems"), tools, body), load };
}

function verdict(answer) {
  return el("div", { id: "verdict" },
    answer.asked.length ? el("p", { class: "notice" }, "Their settings differ: ", words(answer.asked.join("; "))) : null,
    el("pre", {}, words(answer.said)));
}

function problems(page, asked, chosen, answer) {
  const wanted = { differ: (d) => d !== 0, lost: (d) => d < 0, won: (d) => d > 0, all: () => true }[asked.which];
  const rows = answer.rates.filter((each) => wanted(each.second - each.first));
  const link = (each) => el("a", { href: page.link("problem", { first: asked.first, second: asked.second, benchmark: chosen.benchmark, pass: chosen.pass, problem: each.problem }) }, words(each.problem));
  return [table(`${number(rows.length)} of ${number(answer.rates.length)} problems`, [
    ["Problem", link], [words(answer.names[0]), (each) => percent(each.first), "number"], [words(answer.names[1]), (each) => percent(each.second), "number"],
  ], rows.slice(0, FEW), { id: "problems" }), rows.length > FEW ? el("p", { class: "quiet" }, `The first ${FEW} are shown.`) : null];
}

export function showOne(page) {
  const body = el("div");
  const asked = { benchmark: page.params.get("benchmark"), pass: page.params.get("pass"), problem: page.params.get("problem") };
  const sides = ["first", "second"].map((name) => Number(page.params.get(name)));
  const load = async () => {
    const answers = await Promise.all(sides.map((evaluation) => ask("problem", { evaluation, ...asked })));
    fill(body, el("div", { class: "parts" }, words(answers[0].question, { class: "text" })),
      el("p", {}, "Answer: ", words(String(answers[0].attempts[0]?.gold ?? "–"))),
      el("div", { class: "cards" }, answers.flatMap((answer, i) => answer.attempts.map((attempt) =>
        el("article", { class: `card ${attempt.correct ? "right" : "wrong"}` },
          el("header", {}, el("strong", {}, words(page.overview.evaluations[sides[i]].name)), attempt.correct ? "✓ right" : "✗ wrong",
            attempt.truncated ? el("span", { class: "flag bad" }, "truncated") : null),
          el("dl", { class: "facts small" }, el("dt", {}, "answer"), el("dd", {}, words(String(attempt.answer ?? "–"))), el("dt", {}, "tokens"), el("dd", {}, number(attempt.tokens))),
          el("div", { class: "parts", tabindex: "0", role: "region", "aria-label": "Text" }, words(attempt.text, { class: "text" })))))));
  };
  return { node: el("section", {}, el("h2", { tabindex: "-1" }, "Problem ", words(asked.problem ?? "")), body), ready: load };
}
