// The curves of one member: its loss, speed, bandwidth, and the figures that it logs.

import { get } from "./api.js";
import { Chart, axisSwitch, isGap, smoothed } from "./charts.js";
import { element, onceAFrame, toast } from "./dom.js";
import * as format from "./format.js";

const POINTS = 600;
const POINTS_MAX = 1_200; // with more, the thinned curves are fetched again

export class MemberCharts {
  #columns = null;
  #figures = {}; // name -> values
  #charts = new Map();
  #asked = 0;

  /** `member()` returns what to ask the daemon for: `{ peer }` at a master, `{}` at a peer. */
  constructor(member) {
    this.member = member;
    this.box = element("div", { className: "pair filled" });
    this.loss = this.#card("Loss", "own-loss", { log: true });
    this.speed = this.#card("Throughput", "own-speed", { fromZero: true, axis: true });
    this.traffic = this.#card("Bandwidth used", "own-traffic", { fromZero: true });
    this.draw = onceAFrame(() => this.#draw());
  }

  #card(title, id, { log = false, fromZero = false, axis = false }) {
    const tools = element("span", { className: "title-tools" });
    const box = element("div", { className: "chart", id: `${id}-chart` });
    this.box.append(element("section", { className: "card", "aria-label": title }, element("div", { className: "title" }, element("h2", { textContent: title }), tools), box));
    if (axis) tools.append(axisSwitch());
    return new Chart(box, { label: `${title} of this member.`, fromZero, tools: log ? tools : null });
  }

  async load() {
    this.#asked += 1;
    const asked = this.#asked;
    const { columns, figures } = await get("member", { ...this.member(), points: POINTS });
    if (asked !== this.#asked) return;
    this.#columns = columns;
    this.#figures = figures;
    this.draw();
  }

  /** Appends a live point. */
  add(row) {
    const columns = this.#columns;
    if (columns === null || row.at <= (columns.at.at(-1) ?? 0)) return;
    if (isGap(columns.at, row.at)) {
      const blank = columns.at.at(-1) + 0.001;
      for (const [name, values] of Object.entries(columns)) values.push(name === "at" ? blank : null);
      for (const values of Object.values(this.#figures)) values.push(null);
    }
    const before = columns.at.length;
    for (const [name, values] of Object.entries(columns)) values.push(row[name] ?? null);
    for (const name of Object.keys(row.figures)) this.#figures[name] ??= Array(before).fill(null);
    for (const [name, values] of Object.entries(this.#figures)) values.push(row.figures[name] ?? null);
    if (before > POINTS_MAX) this.load().catch((error) => toast(`Loading the charts failed: ${error.message}`, "bad"));
    else this.draw();
  }

  #draw() {
    const columns = this.#columns;
    if (columns === null) return;
    const { at, step } = columns;
    const line = (label, value, more) => ({ label, at, step, value, ...more });
    const quiet = (values) => !values.some((value) => value > 0);
    const loss = { format: format.loss, tick: format.plain, colour: "accent" };
    this.loss.show([line("Each point", columns.loss, { ...loss, thin: true }), line("Loss, smoothed", smoothed(columns.loss), loss)]);
    const speed = { format: format.large, tick: format.large, colour: "accent" };
    const share = { format: format.percent, tick: format.percent, colour: "second", scale: "part", dash: [5, 4] };
    this.speed.show(quiet(columns.tokens_per_s) ? [] : [line("Tokens/s", columns.tokens_per_s.map((each) => each || null), speed), line("Utilisation", columns.utilisation, share)]);
    const rate = { format: format.rate, tick: format.rate };
    const [sent, received] = [rates(at, columns.sent_bytes), rates(at, columns.received_bytes)];
    this.traffic.show(quiet([...sent, ...received]) ? [] : [line("Sent", sent, { ...rate, colour: "accent" }), line("Received", received, { ...rate, colour: "second" })]);
    for (const [name, values] of Object.entries(this.#figures)) {
      if (!this.#charts.has(name)) {
        const chart = this.#card(name, `own-figure-${this.#charts.size}`, {});
        chart.box.parentElement.dataset.figure = name;
        this.#charts.set(name, chart);
      }
      const known = values.map((value, index) => value !== null || step[index] === null);
      const pick = (list) => list.filter((_each, index) => known[index]);
      this.#charts.get(name).show([{ label: name, at: pick(at), step: pick(step), value: pick(values), format: format.figure, tick: format.figure, colour: "accent", dots: true }]);
    }
  }
}

/** Returns bytes per second between counters; null over a gap, and where a counter began again. */
function rates(at, counters) {
  return counters.map((value, index) => {
    const before = counters[index - 1];
    if (index === 0 || value === null || before === null || value < before) return null;
    return (value - before) / Math.max(1e-3, at[index] - at[index - 1]);
  });
}
