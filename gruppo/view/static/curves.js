// Curves of any metric, of several runs at once.

import { ask } from "./api.js";
import { chart } from "./charts.js";
import { box, calmly, el, field, fill, words } from "./dom.js";

const USUAL = [
  "reward", "loss", "kl", "entropy", "completions/mean_length", "completions/clipped_ratio", "frac_reward_zero_std", "grad_norm", "learning_rate",
];

export function show(page) {
  const runs = page.overview.runs, names = runs.map((run) => run.name);
  const every = () => [...new Set(page.overview.runs.flatMap((run) => run.metrics))];
  const asked = page.params.getAll("metric");
  const chosen = new Set(asked.length ? asked : usual(every()));
  const drawn = new Set(runs.map((_, i) => i));
  const charts = new Map();
  let smoothing = Number(page.params.get("smooth") ?? 0);

  const grid = el("div", { class: "charts" });
  const list = el("div", { class: "metric-list" });
  const filter = el("input", { type: "search", oninput: () => metrics() });
  const slider = el("input", {
    type: "range", min: 0, max: 0.99, step: 0.01, value: smoothing, "aria-label": "Smoothing",
    oninput: (event) => { smoothing = Number(event.target.value); remember(); redraw(); },
  });

  const remember = calmly(200, () => page.remember({ metric: [...chosen], smooth: smoothing || null }));
  const metrics = () => fill(list, every().filter((name) => name.toLowerCase().includes(filter.value.toLowerCase())).map((name) =>
    box(words(name), chosen.has(name), (on) => { if (on) chosen.add(name); else chosen.delete(name); remember(); load(); })));

  let curves = [];
  const redraw = () => {
    for (const name of [...charts.keys()]) if (!chosen.has(name)) { charts.get(name).figure.remove(); charts.delete(name); }
    for (const name of chosen) {
      if (!charts.has(name)) {
        charts.set(name, chart(name, names));
        grid.append(charts.get(name).figure);
      }
      charts.get(name).draw(curves.filter((curve) => curve.name === name && drawn.has(curve.run)), smoothing);
    }
  };
  const load = async () => {
    curves = chosen.size ? await ask("curves", { name: [...chosen] }) : [];
    redraw();
  };

  const node = el("section", {},
    el("h2", { tabindex: "-1" }, "Curves"),
    runs.length === 0 ? el("p", {}, "There is no run among these folders.") : null,
    el("div", { class: "tools" },
      el("fieldset", {}, el("legend", {}, "Runs"), runs.map((run, i) => box(
        [el("i", { class: `dot run-${i % 8}` }), words(run.name)], true, (on) => { if (on) drawn.add(i); else drawn.delete(i); redraw(); }))),
      field("Smoothing", slider),
      el("details", { class: "metrics" }, el("summary", {}, "Metrics"), field("Find a metric", filter), list)),
    grid);
  metrics();
  return { node, ready: load, metricsChanged: () => { metrics(); return load(); }, themeChanged: redraw };
}

function usual(names) {
  const found = USUAL.filter((name) => names.includes(name));
  return found.length ? found : names.slice(0, 6);
}
