// The run's charts, of the whole run or a chosen part; fetched once, then updated live.

import { get } from "./api.js";
import { Chart } from "./charts.js";
import { byId, element, onceAFrame, toast } from "./dom.js";
import * as format from "./format.js";

const POINTS = 600;
const POINTS_MAX = 1_200; // with more, the thinned curve is fetched again
const RANGES = [
  ["whole run", null],
  ["last day", 86_400],
  ["last 6 hours", 21_600],
  ["last hour", 3_600],
  ["last 10 minutes", 600],
];

export class History {
  #columns = null;
  #range = null; // { from, to }; null: the whole run
  #asked = 0;
  #latest = null; // on the daemon's clock, which may differ from the browser's

  constructor() {
    const zoom = (from, to) => this.#zoom(from, to);
    this.charts = [
      new Chart("loss", [{ label: "Loss", column: "loss", format: format.loss, tick: format.plain, colour: "accent", band: ["loss_min", "loss_max"] }], {
        zoom,
        log: true,
        label: "Loss over the run's time; the band goes from the lowest to the highest. Drag to zoom.",
      }),
      new Chart(
        "speed",
        [
          { label: "Tokens/s", column: "tokens_per_s", format: format.large, tick: format.large, colour: "accent" },
          { label: "Utilisation", column: "utilisation", format: format.percent, tick: format.percent, colour: "second", scale: "part", dash: [5, 4] },
        ],
        { zoom, fromZero: true, label: "Tokens per second and utilisation over the run's time. Drag to zoom." },
      ),
    ];
    this.select = element(
      "select",
      { "aria-label": "Time range of the charts" },
      ...RANGES.map(([text], index) => element("option", { value: index, textContent: text })),
      element("option", { value: "own", textContent: "selection", hidden: true }),
    );
    this.select.addEventListener("change", () => this.#choose());
    byId("loss-tools").append(this.select);
    this.reset = element("button", { type: "button", className: "plain small", textContent: "Whole run", hidden: true });
    this.reset.addEventListener("click", () => this.#zoom(null, null));
    byId("speed-tools").append(this.reset);
    this.draw = onceAFrame(() => this.charts.forEach((chart) => chart.show(this.#columns)));
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

  async load() {
    this.#asked += 1;
    const asked = this.#asked;
    const range = this.#range ?? {};
    const from = range.seconds ? (this.#latest ?? Date.now() / 1000) - range.seconds : range.from;
    const { columns } = await get("history", { points: POINTS, from: from ?? null, to: range.to ?? null });
    if (asked !== this.#asked) return; // another part was chosen meanwhile
    this.#columns = columns;
    this.#latest = Math.max(this.#latest ?? 0, columns.at.at(-1) ?? 0) || null;
    this.draw();
  }

  /** Appends a new point. */
  add(point) {
    this.#latest = point.at;
    if (this.#columns === null || this.#range?.to) return;
    const columns = this.#columns;
    if (point.at <= (columns.at.at(-1) ?? 0)) return;
    for (const [name, values] of Object.entries(columns)) values.push(point[name] ?? null);
    if (columns.at.length > POINTS_MAX) this.#reload();
    else this.draw();
  }
}
