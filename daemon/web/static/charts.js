// Line charts drawn by uPlot, which is loaded after the first paint.

import { colour } from "./canvas.js";
import { byId, element } from "./dom.js";
import * as format from "./format.js";

const HEIGHT = 228;
const SYNC = "holdfast"; // one cursor for all charts
const TICK_PX = 76;

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

/**
 * One chart. `series` are its lines: `{ label, column, format, tick, colour, band: [low, high]?, dash? }`;
 * `zoom(from, to)` is called with unix seconds after a drag, `zoom(null, null)` for the whole run.
 */
export class Chart {
  #plot = null;
  #data = null;
  #log = false;
  #making = false;

  constructor(id, series, { zoom, label, fromZero = false, log = false, top = null }) {
    this.box = byId(`${id}-chart`);
    this.series = series;
    this.zoom = zoom;
    this.fromZero = fromZero;
    this.top = top;
    this.box.setAttribute("role", "img");
    this.box.setAttribute("aria-label", label);
    this.tools = byId(`${id}-tools`);
    if (log) this.tools.append(this.#logButton());
    this.note = element("p", { className: "empty", textContent: "No data yet." });
    this.box.append(this.note);
    new ResizeObserver(() => this.#fit()).observe(this.box);
    document.addEventListener("themechange", () => this.#plot?.redraw(false, true));
  }

  #logButton() {
    const button = element("button", { type: "button", className: "plain small", textContent: "Log scale", "aria-pressed": "false" });
    button.addEventListener("click", () => {
      this.#log = !this.#log;
      button.setAttribute("aria-pressed", String(this.#log));
      this.#remake();
    });
    return button;
  }

  /** Draws `columns` of /api/history. */
  async show(columns) {
    const lines = this.series.flatMap(({ column, band = [] }) => [column, ...band]);
    this.#data = [columns.at, ...lines.map((name) => columns[name] ?? columns.at.map(() => null))];
    const empty = !this.#data.slice(1).some((line) => line.some((value) => value !== null));
    this.note.hidden = !empty;
    if (empty) return;
    if (this.#plot) {
      this.#plot.setData(this.#data);
      return;
    }
    if (this.#making) return;
    this.#making = true;
    try {
      this.#make(await library());
    } catch (error) {
      this.note.textContent = `No chart: ${error.message}.`;
      this.note.hidden = false;
    } finally {
      this.#making = false;
    }
  }

  #remake() {
    if (!this.#plot) return;
    this.#plot.destroy();
    this.#plot = null;
    this.#make(globalThis.uPlot);
  }

  #fit() {
    if (this.#plot && this.box.clientWidth) this.#plot.setSize({ width: this.box.clientWidth, height: HEIGHT });
  }

  #make(UPlot) {
    const series = [{ label: "Time", value: (_plot, at) => (at === null ? format.UNKNOWN : format.clock(at)) }];
    const bands = [];
    for (const line of this.series) {
      const text = (_plot, value) => line.format(value);
      const ink = () => colour(line.colour);
      const index = series.length;
      series.push({ label: line.label, scale: line.scale ?? "y", stroke: ink, width: 1.5, dash: line.dash, value: text, points: { size: 5 } });
      if (line.band) {
        const none = () => "transparent";
        series.push({ label: "lowest", stroke: none, value: text, points: { show: false } });
        series.push({ label: "highest", stroke: none, value: text, points: { show: false } });
        bands.push({ series: [index + 2, index + 1], fill: () => colour("band") });
      }
    }
    const axis = {
      stroke: () => colour("muted"),
      grid: { stroke: () => colour("line"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    const [first, second] = [this.series[0], this.series.find((line) => line.scale)];
    const axes = [
      { ...axis, size: 28, space: TICK_PX, values: (_plot, ticks, _axis, _space, step) => ticks.map((at) => format.tick(at, step)) },
      { ...axis, size: 58, values: (_plot, ticks) => ticks.map((value) => (value === null ? "" : first.tick(value))) },
    ];
    if (second) {
      axes.push({ ...axis, scale: second.scale, side: 1, size: 46, grid: { show: false }, values: (_plot, ticks) => ticks.map((value) => second.tick(value)) });
    }
    this.#plot = new UPlot(
      {
        width: this.box.clientWidth || 300,
        height: HEIGHT,
        ms: 1e-3,
        cursor: { sync: { key: SYNC }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => this.zoom(null, null) } },
        hooks: { setSelect: [(plot) => this.#selected(plot)] },
        legend: { live: true },
        scales: {
          y: this.#log ? { distr: 3 } : { range: (_plot, low, high) => this.#range(UPlot, low, high) },
          part: { range: () => [0, 1] },
        },
        series,
        bands,
        axes,
      },
      this.#data,
      this.box,
    );
    performance.mark("holdfast-chart");
  }

  #range(UPlot, low, high) {
    if (low === null) return [0, 1];
    const room = Math.max(high - low, Math.abs(high) * 1e-3, 1e-9);
    return UPlot.rangeNum(this.fromZero ? 0 : low, high === low ? high + room : high, 0.1, !this.fromZero);
  }

  #selected(plot) {
    const { left, width } = plot.select;
    if (width < 8) return;
    this.zoom(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }
}
