// Charts by uPlot, in the colours of the page, with one cursor for all of them.

import { el, fill, number, table } from "./dom.js";

const RUNS = 8; // colours in style.css: --run-0 …
const linked = uPlot.sync("gruppo");

export const runColour = (run) => getComputedStyle(document.documentElement).getPropertyValue(`--run-${run % RUNS}`).trim();
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** An exponential mean that starts at the first value; 0 leaves the curve as it is. */
export function smooth(values, weight) {
  let mean = null, share = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = mean === null ? value * (1 - weight) : weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share;
  });
}

/** Curves over their own updates as columns over all of them; nothing where a curve has no point. */
export function joined(curves) {
  const updates = [...new Set(curves.flatMap((curve) => curve.updates))].sort((a, b) => a - b);
  const place = new Map(updates.map((update, i) => [update, i]));
  const columns = curves.map((curve) => {
    const column = new Array(updates.length).fill(undefined);
    curve.updates.forEach((update, i) => { column[place.get(update)] = curve.values[i]; });
    return column;
  });
  return [updates, ...columns];
}

/**
 * A figure with a chart: `draw(curves, smoothing)` puts curves {run, name, updates, values} into it.
 * The line below it has the values under the cursor, for those who see and those who listen, and a table has them all.
 */
export function chart(title, names, { height = 180, range = null } = {}) {
  const place = el("div", { class: "plot" });
  const readout = el("ul", { class: "readout" });
  const rows = el("div");
  const details = el("details", { ontoggle: () => details.open && listed() }, el("summary", {}, "As a table"), rows);
  const figure = el("figure", { class: "chart" }, el("figcaption", {}, title), place, readout, details);
  let plot = null, shown = [], raw = [[]];

  const values = (at) => shown.map((curve, i) => {
    const own = raw[1 + i];
    let place = at === null || at === undefined ? own.length - 1 : at;
    while (place > 0 && (own[place] === null || own[place] === undefined)) place -= 1;
    return el("li", {}, el("i", { class: `dot run-${curve.run % RUNS}` }), `${names[curve.run]}: ${number(own[place])} `,
      el("small", {}, `at ${number(raw[0][place])}`));
  });
  const listed = () => fill(rows, table(`${title}, the newest 200 points`,
    [["Update", (i) => number(raw[0][i]), "number"], ...shown.map((curve, c) => [names[curve.run], (i) => number(raw[1 + c][i]), "number"])],
    raw[0].map((_, i) => i).slice(-200).reverse()));

  const options = (smoothing) => ({
    width: Math.max(place.clientWidth, 200), height,
    legend: { show: false },
    cursor: { sync: { key: linked.key, scales: ["x", null] }, drag: { x: true, y: false } },
    scales: { x: { time: false }, ...(range === null ? {} : { y: { range } }) },
    axes: ["x", "y"].map((axis) => ({
      stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 },
      ...(axis === "y" ? { size: 56 } : { size: 28 }),
    })),
    series: [{}, ...shown.flatMap((curve) => {
      const own = runColour(curve.run), base = { stroke: own, spanGaps: true, points: { show: curve.updates.length < 40 } };
      return smoothing > 0 ? [{ ...base, alpha: 0.25, width: 1, points: { show: false } }, { ...base, width: 2 }] : [{ ...base, width: 1.5 }];
    })],
    hooks: { setCursor: [(own) => fill(readout, values(own.cursor.idx))] },
  });

  const draw = (curves, smoothing = 0) => {
    shown = curves;
    raw = joined(curves);
    const columns = raw.slice(1).flatMap((column) => (smoothing > 0 ? [column, smooth(column, smoothing)] : [column]));
    plot?.destroy();
    plot = new uPlot(options(smoothing), [raw[0], ...columns], place);
    plot.root.setAttribute("aria-hidden", "true");
    fill(readout, values(null));
    if (details.open) listed();
  };
  const resize = () => plot?.setSize({ width: Math.max(place.clientWidth, 200), height });
  new ResizeObserver(resize).observe(place);
  return { figure, draw };
}
