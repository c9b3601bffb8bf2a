// Line charts drawn by uPlot, which is loaded after the first paint.

import { colour } from "./canvas.js";
import { element } from "./dom.js";
import * as format from "./format.js";
import { isLoss } from "./headline.js";

const HEIGHT = 228;
const SYNC = "holdfast"; // one cursor for all charts
const TICK_PX = 76;
const SMOOTHED = 0.02; // of a line's points, on either side of one
const FAINT = "73"; // alpha of lines behind the main one
const FLAT = 1e-3; // of a line's height: changes by less are not magnified
const SHADES = 8; // --line-1 to --line-8 in the style sheet

let loading = null;

/** Loads the library once. */
function library() {
  loading ??= new Promise((resolve, reject) => {
    const style = element("link", { rel: "stylesheet", href: "static/vendor/uPlot.min.css" });
    const script = element("script", { src: "static/vendor/uPlot.iife.min.js" });
    script.addEventListener("load", () => resolve(globalThis.uPlot));
    script.addEventListener("error", () => reject(new Error("the charting library did not load")));
    document.head.append(style, script);
  });
  return loading;
}

/** Returns the colour and the dashes of the line number `index` beside the main one. */
export const shade = (index) => ({ colour: `line-${(index % SHADES) + 1}`, dash: index >= SHADES ? [4, 3] : undefined });

// As in the daemon's answers: a time without a point that is longer than this, and than so many times the one before.
const GAP_S = 20;
const GAP_FACTOR = 4;

const WHOLE_GAPS = 2; // where lines are joined, a null is one from point to point

/** Returns whether a gap is between the last of these times and a new one: the member was away. */
export const isGap = (times, at) => times.length > 1 && at - times.at(-1) > Math.max(GAP_S, GAP_FACTOR * (times.at(-1) - times.at(-2)));

// ---------------------------------------------------------------- the axis of all charts

const AXIS = "holdfast-axis";

function storedAxis() {
  try {
    return localStorage.getItem(AXIS) === "step" ? "step" : "time";
  } catch {
    return "time"; // storage is disabled
  }
}

/** What all charts are drawn over, "time" or "step"; an `axischange` of the document tells of a change. */
export const axis = {
  now: storedAxis(),
  use(value) {
    this.now = value;
    try {
      localStorage.setItem(AXIS, value);
    } catch {
      // for this page only
    }
    document.dispatchEvent(new Event("axischange"));
  },
};

/** Makes a switch between the two axes. */
export function axisSwitch() {
  const buttons = ["time", "step"].map((value) => {
    const button = element("button", { type: "button", className: "plain small", textContent: `by ${value}` });
    button.addEventListener("click", () => axis.use(value));
    return [value, button];
  });
  const show = () => buttons.forEach(([value, button]) => button.setAttribute("aria-pressed", String(axis.now === value)));
  document.addEventListener("axischange", show);
  show();
  return element("span", { className: "switch", role: "group", "aria-label": "Axis of the charts" }, ...buttons.map(([, button]) => button));
}

// ---------------------------------------------------------------- marks in all charts

/** What happened to the run itself: `{ at, text }`, oldest first; a `markschange` of the document tells of a new one. */
export const marks = {
  rows: [],
  use(rows) {
    this.rows = rows;
    document.dispatchEvent(new Event("markschange"));
  },
};

/** Returns the centred mean of values: over no gap, and over fewer towards both ends, which stay as they are. */
export function smoothed(values) {
  const most = Math.round(SMOOTHED * values.length);
  const known = (index) => typeof values[index] === "number";
  return values.map((value, index) => {
    if (!known(index)) return value;
    let [radius, sum] = [0, value];
    while (radius < most && known(index - radius - 1) && known(index + radius + 1)) {
      radius += 1;
      sum += values[index - radius] + values[index + radius];
    }
    return sum / (2 * radius + 1);
  });
}

// ---------------------------------------------------------------- a chart

/**
 * One chart in a box. `zoom(from, to)` is called with unix seconds after a drag, `zoom(null, null)` for
 * the whole run; without it a drag does nothing.
 */
export class Chart {
  #plot = null;
  #form = ""; // of the plot's series; another one needs another plot
  #lines = [];
  #log = false;
  #making = false;

  constructor(box, { zoom = null, label, fromZero = false, tools = null }) {
    this.box = box;
    this.zoom = zoom;
    this.label = label;
    this.fromZero = fromZero;
    if (tools) tools.append(this.#logButton());
    this.note = element("p", { className: "empty", textContent: "No points yet." });
    box.append(this.note);
    new ResizeObserver(() => this.#fit()).observe(box);
    document.addEventListener("themechange", () => this.#plot?.redraw(false, true));
    document.addEventListener("axischange", () => this.show(this.#lines));
    document.addEventListener("markschange", () => this.#plot?.redraw(false));
  }

  #logButton() {
    const button = element("button", { type: "button", className: "plain small", textContent: "Log scale", "aria-pressed": "false" });
    button.addEventListener("click", () => {
      this.#log = !this.#log;
      button.setAttribute("aria-pressed", String(this.#log));
      this.show(this.#lines);
    });
    return button;
  }

  /**
   * Draws lines: `{ label, format, tick, colour, at, step, value, thin?, dots?, dash?, scale?, low?, high? }`.
   * `at`, `step`, `value` are of one length; a value of null is a gap. Between `low` and `high` is a band.
   * With `dots`, points that are far enough apart are drawn on a thin line, too.
   */
  async show(lines) {
    this.#lines = lines;
    const shown = lines.filter(hasPoints);
    this.note.hidden = shown.length > 0;
    this.note.textContent = onlyPoints(lines) || "No points yet.";
    this.box.classList.toggle("blank", shown.length === 0);
    if (shown.length === 0) {
      this.#drop();
      return;
    }
    if (this.#making) return;
    this.#making = true;
    try {
      this.#draw(await library(), this.#lines.filter(hasPoints));
    } catch (error) {
      this.note.textContent = `No chart: ${error.message}.`;
      this.note.hidden = false;
    } finally {
      this.#making = false;
    }
  }

  #drop() {
    this.#plot?.destroy();
    this.#plot = null;
  }

  #fit() {
    if (this.#plot && this.box.clientWidth) this.#plot.setSize({ width: this.box.clientWidth, height: HEIGHT });
  }

  #draw(UPlot, lines) {
    const data = joined(UPlot, lines);
    const form = JSON.stringify([axis.now, this.#log, lines.map(({ label, colour: ink, dash, low }) => [label, ink, dash, Boolean(low)])]);
    if (this.#plot && form === this.#form) {
      this.#plot.setData(data);
      return;
    }
    this.#drop();
    this.#form = form;
    this.#plot = this.#make(UPlot, lines, data);
    this.#plot.root.querySelectorAll("canvas").forEach((canvas) => {
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", this.label);
    });
    performance.mark("holdfast-chart");
  }

  #make(UPlot, lines, data) {
    const bySteps = axis.now === "step";
    const told = bySteps ? format.count : format.clock;
    const series = [{ label: bySteps ? "Step" : "Time", value: (plot, x, _series, index) => told(index === null ? plot.data[0].at(-1) : x) }];
    const bands = [];
    const hidden = [];
    for (const line of lines) {
      const text = (plot, value, number, index) => line.format(index === null ? newest(plot.data[number]) : value);
      const index = series.length;
      series.push({ label: line.label, scale: line.scale ?? "y", stroke: () => colour(line.colour) + (line.thin ? FAINT : ""), width: line.thin ? 1 : 1.8, dash: line.dash, value: text, points: line.thin && !line.dots ? { show: false } : { size: 5 } });
      if (!line.low) continue;
      for (const label of ["lowest", "highest"]) {
        hidden.push(series.length);
        series.push({ label, stroke: () => "transparent", value: text, points: { show: false } });
      }
      bands.push({ series: [index + 2, index + 1], fill: () => colour("band") });
    }
    const plot = new UPlot(
      {
        width: this.box.clientWidth || 300,
        height: HEIGHT,
        ms: 1e-3,
        cursor: { sync: { key: SYNC }, drag: { x: this.zoom !== null, y: false, setScale: false }, bind: { dblclick: () => () => this.zoom?.(null, null) } },
        hooks: { setSelect: [(made) => this.#selected(made)], draw: [(made) => this.#mark(made)] },
        legend: { live: true },
        scales: {
          x: { time: !bySteps },
          y: this.#log ? { distr: 3 } : { range: (_plot, low, high) => this.#range(UPlot, low, high) },
          part: { range: () => [0, 1] },
          cosine: { range: () => [-1, 1] },
        },
        series,
        bands,
        axes: this.#axes(lines, bySteps),
      },
      data,
      this.box,
    );
    const rows = plot.root.querySelectorAll(".u-legend .u-series");
    for (const index of hidden) rows[index].hidden = true;
    return plot;
  }

  #axes(lines, bySteps) {
    const plain = {
      stroke: () => colour("muted"),
      grid: { stroke: () => colour("line"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    const second = lines.find((line) => line.scale);
    const first = lines.find((line) => !line.scale);
    const axes = [
      {
        ...plain,
        size: 28,
        space: TICK_PX,
        incrs: bySteps ? STEPS : undefined,
        values: (_plot, ticks, _axis, _space, by) => unlike(ticks.map((x) => (bySteps ? format.count(x) : format.tick(x, by)))),
      },
      { ...plain, size: 58, values: (_plot, ticks) => unlike(ticks.map((value) => (value === null || !first ? "" : first.tick(value)))) },
    ];
    if (second) {
      axes.push({ ...plain, scale: second.scale, side: 1, size: 46, grid: { show: false }, values: (_plot, ticks) => ticks.map((value) => second.tick(value)) });
    }
    return axes;
  }

  /** Puts a line into the picture for each mark within it; its text is the line's title. */
  #mark(plot) {
    plot.over.querySelectorAll(".mark").forEach((each) => each.remove());
    const { min, max } = plot.scales.x;
    for (const { at, text } of marks.rows) {
      const x = axis.now === "step" ? this.#stepAt(at) : at;
      if (x === null || x < min || x > max) continue;
      const line = element("i", { className: "mark", "data-tone": isLoss(text) ? "bad" : "", title: `${format.clock(at)} ${text}` });
      line.style.left = `${plot.valToPos(x, "x")}px`;
      plot.over.append(line);
    }
  }

  /** Returns the step of the first point after a moment. */
  #stepAt(moment) {
    for (const { at, step } of this.#lines) {
      const found = at.findIndex((each, index) => each >= moment && step[index] !== null);
      if (found >= 0) return step[found];
    }
    return null;
  }

  #range(UPlot, low, high) {
    if (low === null) return [0, 1];
    if (this.fromZero) return [0, UPlot.rangeNum(0, high || 1, 0.1, false)[1]]; // level with the zero of the other axis
    const middle = Math.abs(high + low) / 2;
    if (high - low > FLAT * middle) return UPlot.rangeNum(low, high, 0.1, true);
    const room = middle * 0.1 || 1; // a level line, in the middle
    return [low - room, high + room];
  }

  #selected(plot) {
    const { left, width } = plot.select;
    if (width < 8) return;
    const ends = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.zoom(...(axis.now === "step" ? this.#times(ends) : ends));
  }

  /** Returns the times at which the lines were between two steps. */
  #times([from, to]) {
    const times = this.#lines.flatMap(({ at, step }) => at.filter((_time, index) => step[index] !== null && step[index] >= from && step[index] <= to));
    return times.length ? [Math.min(...times), Math.max(...times)] : [null, null];
  }
}

const STEPS = [1, 2, 5].flatMap((first) => [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map((zeros) => first * 10 ** zeros)).sort((a, b) => a - b);

/** Returns the columns of a plot: x, then the values of each line; null in a gap, undefined between its points. */
export function joined(UPlot, lines) {
  const tables = lines.map(table);
  return UPlot.join(tables, tables.map((columns) => columns.map(() => WHOLE_GAPS)));
}

/** Returns whether a line has values at two moments or more: one point has no axis. */
function hasPoints({ at, step, value }) {
  const x = axis.now === "step" ? step : at;
  const first = value.findIndex((each, index) => each !== null && x[index] !== null);
  return first >= 0 && value.some((each, index) => each !== null && x[index] !== null && x[index] !== x[first]);
}

/** Returns in words what figures show that have one point each. */
const onlyPoints = (lines) =>
  lines
    .filter(({ dots }) => dots)
    .map(({ label, format: told, value }) => [label, told, value.findLast((each) => typeof each === "number")])
    .filter(([, , last]) => last !== undefined)
    .map(([label, told, last]) => `${label} ${told(last)}`)
    .join(", ");

/** Returns x and the values of a line as uPlot wants them: in order, each x once. */
function table({ at, step, value, low, high }) {
  const values = low ? [value, low, high] : [value];
  if (axis.now === "time") {
    const first = value.findIndex((each) => each !== null); // what was before it is no part of the picture
    return [at, ...values].map((each) => each.slice(first));
  }
  const newestAt = new Map(); // after a rewind the later values count
  step.forEach((x, index) => {
    if (x !== null && value[index] !== null) newestAt.set(x, index);
  });
  const order = [...newestAt].sort(([a], [b]) => a - b);
  return [order.map(([x]) => x), ...values.map((each) => order.map(([, index]) => each[index]))];
}

/** Returns the last value of a column; null if the line ends in a gap. */
const newest = (values) => values.findLast((value) => value !== undefined) ?? null;

/** Returns labels without those that repeat the one before. */
const unlike = (labels) => labels.map((label, index) => (index > 0 && label === labels[index - 1] ? "" : label));
