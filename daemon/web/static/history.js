// The run's charts: loss, throughput and the figures of run.log; fetched once, then updated live.

import { get } from "./api.js";
import { Chart, axisSwitch, isGap, marks, shade, smoothed } from "./charts.js";
import { byId, element, onceAFrame, say, toast } from "./dom.js";
import * as format from "./format.js";

const POINTS = 600;
const POINTS_MAX = 1_200; // with more, the thinned curve is fetched again
const MARKS_MAX = 200;
const LINE_POINTS = 300; // of each member
const LINES_MAX = 16; // members in one chart, as the daemon answers
const RANGES = [
  ["whole run", null],
  ["last day", 86_400],
  ["last 6 hours", 21_600],
  ["last hour", 3_600],
  ["last 10 minutes", 600],
];

/** A column or a figure over time: a line of each member, and their mean. */
export class Lines {
  #seen = new Map(); // peer -> the times of its last two live points
  #away = new Set(); // peers that were away since their last value

  constructor(query) {
    this.query = query;
    this.mean = null;
    this.lines = new Map(); // peer -> { peer, name, at, step, value }
    this.leftOut = 0;
  }

  async load(span) {
    const { mean, lines, left_out: leftOut } = await get("lines", { ...this.query, points: LINE_POINTS, ...span });
    this.#seen.clear();
    this.#away.clear();
    this.mean = mean;
    this.lines = new Map(lines.map((line) => [line.peer, line]));
    this.leftOut = leftOut;
  }

  /**
   * Appends a live point of a member; of the mean if `peer` is empty. Returns whether there are too many points.
   * A point without a value adds nothing, but the member was there: no gap.
   */
  add({ peer, name, at, step }, value) {
    const known = peer === "" ? this.mean : this.lines.get(peer);
    const seen = this.#seen.get(peer) ?? (this.query.column ? (known?.at.slice(-2) ?? []) : []);
    const gap = this.#away.delete(peer) || isGap(seen, at);
    if (at > (seen.at(-1) ?? 0)) this.#seen.set(peer, [...seen.slice(-1), at]);
    if (typeof value !== "number") {
      if (gap || step === null) this.#away.add(peer); // or the run waits
      return false;
    }
    if (!known && peer !== "" && this.lines.size >= LINES_MAX) return false;
    const line = known ?? { peer, name, at: [], step: [], value: [] };
    if (peer === "") this.mean = line;
    else this.lines.set(peer, line);
    if (at <= (line.at.at(-1) ?? 0)) return false;
    if (gap && line.at.length) {
      line.at.push(line.at.at(-1) + 0.001);
      line.step.push(null);
      line.value.push(null);
    }
    line.at.push(at);
    line.step.push(step);
    line.value.push(value);
    return line.at.length > POINTS_MAX;
  }

  /** Returns the members' lines for a chart, in the order of their names, so that each keeps its colour. */
  thin(more) {
    const order = [...this.lines.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
    return order.map((line, index) => ({ ...line, ...more, ...shade(index), label: line.name, thin: order.length > 1 }));
  }
}

export class History {
  #columns = null;
  #range = null; // { from, to } or { seconds }; null: the whole run
  #asked = 0;
  #latest = null; // on the daemon's clock, which may differ from the browser's
  #losses = new Lines({ column: "loss" });
  #figures = new Map(); // name -> { lines, chart, note }

  constructor() {
    this.zoom = (from, to) => this.#zoom(from, to);
    this.loss = new Chart(byId("loss-chart"), { zoom: this.zoom, tools: byId("loss-tools"), label: "Loss of each member and of the run. Drag to zoom." });
    this.speed = new Chart(byId("speed-chart"), { zoom: this.zoom, fromZero: true, label: "Tokens per second and utilisation of the run. Drag to zoom." });
    this.outer = new Chart(byId("outer-chart"), { zoom: this.zoom, label: "How far outer steps go along their gradients, and the cosine of gradient and momentum. Drag to zoom." });
    this.select = element(
      "select",
      { "aria-label": "Time range of the charts" },
      ...RANGES.map(([text], index) => element("option", { value: index, textContent: text })),
      element("option", { value: "own", textContent: "selection", hidden: true }),
    );
    this.select.addEventListener("change", () => this.#choose());
    byId("loss-tools").append(this.select);
    this.leftOut = element("p", { className: "muted chart-note", hidden: true });
    byId("loss-chart").after(this.leftOut);
    this.reset = element("button", { type: "button", className: "plain small", textContent: "Whole run", hidden: true });
    this.reset.addEventListener("click", () => this.#zoom(null, null));
    byId("speed-tools").append(this.reset, axisSwitch());
    this.draw = onceAFrame(() => this.#draw());
  }

  #choose() {
    const seconds = RANGES[Number(this.select.value)]?.[1] ?? null;
    if (seconds === null) return this.#zoom(null, null);
    this.#range = { seconds };
    this.reset.hidden = false;
    return this.#reload();
  }

  #zoom(from, to) {
    this.#range = from === null ? null : { from, to };
    this.select.value = from === null ? "0" : "own";
    this.reset.hidden = from === null;
    this.#reload();
  }

  #reload() {
    this.load().catch((error) => toast(`Loading the charts failed: ${error.message}`, "bad"));
  }

  #span() {
    const range = this.#range ?? {};
    const from = range.seconds ? (this.#latest ?? Date.now() / 1000) - range.seconds : range.from;
    return { from: from ?? null, to: range.to ?? null };
  }

  async load() {
    this.#asked += 1;
    const asked = this.#asked;
    const span = this.#span();
    const [{ columns, figures }] = await Promise.all([get("history", { points: POINTS, ...span }), this.#losses.load(span), this.#loadMarks()]);
    if (asked !== this.#asked) return; // another part was chosen meanwhile
    this.#columns = columns;
    this.#latest = Math.max(this.#latest ?? 0, columns.at.at(-1) ?? 0) || null;
    this.draw();
    for (const name of figures) {
      await this.#figure(name).lines.load(span); // one after another: a run may log many
      if (asked !== this.#asked) return;
      this.draw();
    }
  }

  async #loadMarks() {
    const { events } = await get("events", { kind: "run", limit: MARKS_MAX });
    marks.use(events.filter(isMark));
  }

  /** Takes a live event. */
  log(event) {
    if (isMark(event)) marks.use([...marks.rows, event].slice(-MARKS_MAX));
  }

  /** Returns a figure, with its card in the page. */
  #figure(name) {
    const known = this.#figures.get(name);
    if (known) return known;
    const box = element("div", { className: "chart" });
    const note = element("p", { className: "muted chart-note", hidden: true });
    const card = element("section", { className: "card", "aria-label": `Figure ${name}` }, element("div", { className: "title" }, element("h2", { textContent: name }), element("span", { className: "muted small-text", textContent: "run.log" })), box, note);
    card.dataset.figure = name;
    byId("logged").append(card);
    byId("logged").hidden = false;
    const figure = { lines: new Lines({ figure: name }), note, chart: new Chart(box, { zoom: this.zoom, label: `${name} of each member, and the mean. Drag to zoom.` }) };
    this.#figures.set(name, figure);
    return figure;
  }

  /** Appends a new point of the run. */
  add(point) {
    this.#latest = point.at;
    if (this.#columns === null || this.#range?.to) return;
    const columns = this.#columns;
    if (point.at <= (columns.at.at(-1) ?? 0)) return;
    for (const [name, values] of Object.entries(columns)) values.push(point[name] ?? null);
    if (columns.at.length > POINTS_MAX) this.#reload();
    else this.draw();
  }

  /** Appends new points of members; the first one is the mean. */
  sample(rows) {
    if (this.#columns === null || this.#range?.to) return;
    let full = false;
    for (const row of rows) {
      if (row.peer !== "") full = this.#losses.add(row, row.loss) || full;
      for (const name of Object.keys(row.figures)) this.#figure(name);
      for (const [name, { lines }] of this.#figures) full = lines.add(row, row.figures[name]) || full;
    }
    if (full) this.#reload();
    else this.draw();
  }

  #draw() {
    const columns = this.#columns;
    if (columns === null) return;
    const { at, step } = columns;
    const own = { format: format.loss, tick: format.plain };
    const members = this.#losses.lines.size > 1 ? this.#losses.thin(own) : []; // one's loss is the run's
    const band = this.#losses.leftOut > 0 || members.length === 0;
    this.loss.show([
      ...(members.length ? members : [{ ...own, label: "Each point", at, step, value: columns.loss, colour: "accent", thin: true }]),
      { ...own, label: members.length ? "Mean, smoothed" : "Loss, smoothed", at, step, value: smoothed(columns.loss), colour: "accent", ...(band ? { low: columns.loss_min, high: columns.loss_max } : {}) },
    ]);
    leftOut(this.leftOut, this.#losses);
    const moves = columns.tokens_per_s.some((value) => value > 0);
    this.speed.show(
      !moves
        ? []
        : [
            { label: "Tokens/s", at, step, value: columns.tokens_per_s.map((each) => each || null), format: format.large, tick: format.large, colour: "accent" },
            { label: "Utilisation", at, step, value: columns.utilisation, format: format.percent, tick: format.percent, colour: "second", scale: "part", dash: [5, 4] },
          ],
    );
    const known = columns.outer_gain.some((value) => value !== null);
    byId("outer").hidden = !known;
    this.outer.show(
      !known
        ? []
        : [
            { label: "Step, in outer rates along its gradient", at, step, value: columns.outer_gain, format: format.figure, tick: format.figure, colour: "accent" },
            { label: "Cosine of gradient and momentum", at, step, value: columns.outer_cosine, format: format.figure, tick: format.figure, colour: "second", scale: "cosine", dash: [5, 4] },
          ],
    );
    for (const { lines, chart, note } of this.#figures.values()) {
      const own = { format: format.figure, tick: format.figure, dots: true };
      const shown = lines.thin(own);
      const mean = lines.mean && shown.length !== 1 ? [{ ...lines.mean, ...own, label: "Mean", colour: "accent" }] : [];
      chart.show([...shown, ...mean]);
      leftOut(note, lines);
    }
  }
}

/** Returns whether an event is marked in all charts: a rewind, a restart, changed settings, a pause, the end. */
const isMark = ({ kind, peer }) => kind === "run" && !peer;

function leftOut(note, lines) {
  note.hidden = lines.leftOut === 0;
  say(note, `Lines of ${lines.lines.size} members; ${lines.leftOut} more are not drawn.`);
}
