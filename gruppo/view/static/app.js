// The page: which part of it is shown, and what has changed since.

import { ask, query, report } from "./api.js";
import * as curves from "./curves.js";
import { choice, el, field, fill, number, visible, words } from "./dom.js";
import * as evaluations from "./evaluations.js";
import * as group from "./group.js";
import * as groups from "./groups.js";
import * as prompts from "./prompts.js";
import * as run from "./run.js";
import * as tokens from "./tokens.js";

const PAGES = { curves: "Curves", groups: "Groups", prompts: "Prompts", evaluations: "Evaluations", run: "Settings" };
const VIEWS = {
  curves: curves.show, groups: groups.show, group: group.show, tokens: tokens.show, prompts: prompts.show, prompt: prompts.showOne,
  evaluations: evaluations.show, problem: evaluations.showOne, run: run.show,
};
const PARENTS = { group: "groups", tokens: "groups", prompt: "prompts", problem: "evaluations" };
const EVERY = 2000, SOON = 250; // milliseconds between two looks at the runs, and while they are read for the first time

const OVER_ALL = ["curves", "evaluations", "run"]; // views of all runs or evaluations, which a new one joins

const main = document.getElementById("main"), status = document.getElementById("status");
let overview = null, view = null, shown = "", results = null;

const link = (name, params = {}) => `#${name}?${query(params)}`;

/** Where we are: `#groups?run=0&order=spread`. */
function place() {
  const [name, params] = location.hash.slice(1).split("?");
  const first = overview.runs.length ? "curves" : "evaluations";
  return { name: Object.hasOwn(VIEWS, name) ? name : first, params: new URLSearchParams(params ?? "") };
}

/** What a view gets: the overview, its parameters, and how to make links. */
function pageOf(name, params) {
  const whole = (value) => (/^\d+$/.test(value ?? "") ? Number(value) : 0);
  return {
    get overview() { return overview; },
    params, link,
    run: () => Math.min(whole(params.get("run")), Math.max(overview.runs.length - 1, 0)),
    numbers: (...names) => Object.fromEntries(names.map((each) => [each, whole(params.get(each))])),
    runChoice: (chosen, changed) => choice(overview.runs.map((each, i) => [i, each.name]), chosen, (value) => changed(Number(value))),
    /** The choice of a run where there are several; else something in its place. */
    runField(chosen, changed) { return overview.runs.length > 1 ? field("Run", this.runChoice(chosen, changed)) : el("span", { hidden: true }); },
    remember: (values) => {
      if (shown !== name) return;
      try { history.replaceState(null, "", link(name, values)); } catch { /* a report that is opened from disk */ }
    },
  };
}

async function guarded(work) {
  try {
    await work();
  } catch (error) {
    main.querySelector(".error")?.remove();
    main.append(el("p", { class: "error", role: "alert" }, visible(error.message)));
  }
}

async function navigate(focus = true) {
  const { name, params } = place();
  shown = name;
  for (const each of document.querySelectorAll("#pages a")) {
    if (each.dataset.page === (PARENTS[name] ?? name)) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  document.title = `${PAGES[PARENTS[name] ?? name]} – gruppo view`;
  if (overview.runs.length === 0 && !["evaluations", "problem"].includes(name)) {
    view = null;
    fill(main, el("p", {}, "There is no run among these folders."));
    return;
  }
  delete main.dataset.ready;
  view = VIEWS[name](pageOf(name, params));
  fill(main, view.node);
  if (focus) main.querySelector("h2")?.focus({ preventScroll: false });
  await guarded(async () => view.ready?.());
  if (shown === name) main.dataset.ready = name;
}

const SILENT = new Set(["not finished", "no news"]);

function tell(state) {
  const runs = state.runs.map((each, i) => {
    const done = each.update === null ? "no update yet" : `update ${number(each.update)}`;
    const index = each.indexed ? `${number(each.completions)} completions` : "reading completions …";
    const since = SILENT.has(each.status) && each.time ? [" since ", words(each.time)] : [];
    const name = overview.runs.length > 1 ? [words(overview.runs[i].name), ": "] : [];
    return [i > 0 ? " · " : "", name, each.status, since, `, ${done}, ${index}`];
  });
  const said = el("p", {}, report === null ? null : "A report. ", runs);
  if (status.textContent !== said.textContent) fill(status, ...said.childNodes); // what is said again is not read out again
}

/** Look whether the runs have gone on, and let the view know. */
async function look() {
  if (document.hidden) return;
  try {
    const state = await ask("state");
    const before = overview.runs.map((each) => each.state), known = results ?? (results = state.results.join());
    const differs = (name) => state.runs.some((each, i) => each[name] !== before[i]?.[name]);
    const metrics = differs("metrics"), rollouts = differs("rollouts"), grown = state.runs.length !== before.length;
    results = state.results.join();
    if (metrics || rollouts || results !== known) {
      overview = await ask("overview");
      if (((grown || results !== known) && OVER_ALL.includes(shown)) || (grown && view === null)) await navigate(false);
      else {
        if (metrics) await guarded(async () => view?.metricsChanged?.());
        if (rollouts) await guarded(async () => view?.rolloutsChanged?.());
      }
    }
    tell({ runs: overview.runs.map((each, i) => state.runs[i] ?? each.state) });
  } catch (error) {
    status.textContent = visible(error.message);
  }
}

function themeButton() {
  const button = document.getElementById("theme"), root = document.documentElement;
  const dark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => { button.textContent = dark() ? "Light theme" : "Dark theme"; };
  const changed = () => { name(); view?.themeChanged?.(); };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("gruppo-theme", root.dataset.theme); } catch { /* no storage: it holds until the page is closed */ }
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  name();
}

async function start() {
  fill(document.getElementById("pages"), Object.entries(PAGES).map(([name, title]) =>
    el("li", {}, el("a", { href: link(name), "data-page": name }, title))));
  themeButton();
  overview = await ask("overview");
  tell({ runs: overview.runs.map((each) => each.state) });
  addEventListener("hashchange", () => navigate());
  document.querySelector(".skip").addEventListener("click", (event) => { // the part after # is the address of the view
    event.preventDefault();
    main.focus();
  });
  await navigate(false);
  if (report === null) {
    const again = async () => {
      await look();
      setTimeout(again, overview.runs.every((each) => each.state.indexed) ? EVERY : SOON);
    };
    await again();
  }
}

start().catch((error) => fill(main, el("p", { class: "error", role: "alert" }, visible(error.message))));
