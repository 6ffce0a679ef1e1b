// What was run: settings, side by side, and what happened.

import { ask } from "./api.js";
import { box, el, fill, table, words } from "./dom.js";

const OWN = new Set(["time", "event", "update"]);

export function show(page) {
  const runs = page.overview.runs, body = el("div");
  let onlyOther = runs.length > 1, settings = [];
  const draw = () => {
    const names = [...new Set(settings.flatMap((each) => Object.keys(each)))];
    const differ = (name) => new Set(settings.map((each) => each[name])).size > 1;
    const rows = names.filter((name) => !onlyOther || differ(name));
    fill(body,
      runs.length > 1 ? box("Only settings that differ", onlyOther, (on) => { onlyOther = on; draw(); }) : null,
      table("Settings", [["Name", (name) => words(name)], ...runs.map((run, i) => [words(run.name), (name) => words(settings[i][name] ?? "–")])], rows, { id: "settings" }),
      runs.map((run) => table(["What happened in ", words(run.name)], [
        ["When", (event) => words(event.time ?? "–")], ["What", (event) => words(event.event ?? "–")], ["Update", (event) => words(event.update ?? "–")],
        ["More", (event) => words(JSON.stringify(Object.fromEntries(Object.entries(event).filter(([name]) => !OWN.has(name)))))],
      ], [...run.events].reverse())));
  };
  const load = async () => {
    settings = await Promise.all(runs.map((_, run) => ask("settings", { run })));
    draw();
  };
  return { node: el("section", {}, el("h2", { tabindex: "-1" }, "Settings and events"), body), ready: load, metricsChanged: draw };
}
