// Charts by uPlot, in the colours of the page, with one cursor for all of them.

import { el, fill, number, table, words } from "./dom.js";

const RUNS = 8; // colours in style.css: --run-0 …
const FEW = 40; // points that are drawn one by one
const STEPS = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat(); // of an axis of updates: there is no half one
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
 * A figure with a chart: `draw(curves, smoothing)` puts curves {run, name, updates, values} into it, and leaves the part that
 * somebody has zoomed into where it is. `title` and `names`, those of the runs, may be anybody's words.
 * The line below it has the values under the cursor, for those who see and those who listen, and a table has them all.
 */
export function chart(title, names, { height = 180, range = null } = {}) {
  const place = el("div", { class: "plot" });
  const readout = el("ul", { class: "readout" });
  const rows = el("div");
  const details = el("details", { ontoggle: () => details.open && listed() }, el("summary", {}, "As a table"), rows);
  const figure = el("figure", { class: "chart" }, el("figcaption", {}, words(title)), place, readout, details);
  let plot = null, drawn = "", shown = [], raw = [[]], smoothed = null;

  const values = (at) => shown.map((curve, i) => {
    const own = raw[1 + i];
    let place = at === null || at === undefined ? own.length - 1 : at;
    while (place > 0 && (own[place] === null || own[place] === undefined)) place -= 1;
    const mean = smoothed === null ? "" : `(smoothed ${number(smoothed[i][place])}) `;
    return el("li", {}, el("i", { class: `dot run-${curve.run % RUNS}` }), words(names[curve.run]), `: ${number(own[place])} ${mean}`,
      el("small", {}, `at ${number(raw[0][place])}`));
  });
  const listed = () => fill(rows, table([words(title), `, the newest 200 points${smoothed === null ? "" : ", not smoothed"}`],
    [["Update", (i) => number(raw[0][i]), "number"], ...shown.map((curve, c) => [words(names[curve.run]), (i) => number(raw[1 + c][i]), "number"])],
    raw[0].map((_, i) => i).slice(-200).reverse()));

  const options = (smoothing) => ({
    width: Math.max(place.clientWidth, 200), height,
    legend: { show: false },
    cursor: { sync: { key: linked.key, scales: ["x", null] }, drag: { x: true, y: false } },
    scales: { x: { time: false }, ...(range === null ? {} : { y: { range } }) },
    axes: ["x", "y"].map((axis) => ({
      stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 },
      ...(axis === "y" ? { size: 56 } : { size: 28, incrs: STEPS }),
    })),
    series: [{}, ...shown.flatMap((curve, i) => {
      const own = runColour(curve.run), base = { stroke: own, spanGaps: true, points: { show: () => shown[i].updates.length < FEW } };
      return smoothing > 0 ? [{ ...base, alpha: 0.25, width: 1, points: { show: false } }, { ...base, width: 2 }] : [{ ...base, width: 1.5 }];
    })],
    hooks: { setCursor: [(own) => fill(readout, values(own.cursor.idx))] },
  });

  /** The updates that are shown, if they are not all of them. */
  const zoomed = () => {
    const { min, max } = plot?.scales.x ?? {};
    return plot !== null && raw[0].length > 1 && (min > raw[0][0] || max < raw[0].at(-1)) ? { min, max } : null;
  };
  const draw = (curves, smoothing = 0) => {
    shown = curves;
    const part = zoomed();
    raw = joined(curves);
    smoothed = smoothing > 0 ? raw.slice(1).map((column) => smooth(column, smoothing)) : null;
    const data = [raw[0], ...raw.slice(1).flatMap((column, i) => (smoothed === null ? [column] : [column, smoothed[i]]))];
    const same = JSON.stringify([smoothed === null, curves.map((curve) => curve.run), colour("--line")]); // what a chart is made for
    if (plot !== null && drawn === same) plot.setData(data, part === null);
    else {
      plot?.destroy();
      plot = new uPlot(options(smoothing), data, place);
      plot.root.setAttribute("aria-hidden", "true");
      drawn = same;
    }
    if (part !== null) plot.setScale("x", part);
    fill(readout, values(plot.cursor.idx));
    if (details.open) listed();
  };
  const resize = () => plot?.setSize({ width: Math.max(place.clientWidth, 200), height });
  new ResizeObserver(resize).observe(place);
  return { figure, draw };
}
