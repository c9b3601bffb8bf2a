// The measured bandwidth of each pair as a heat map; a pointer or the arrow keys read the numbers.

import { Drawing, colour, fitted } from "./canvas.js";
import { byId, element, say } from "./dom.js";
import * as format from "./format.js";

const CELL_MAX = 72;
const LABEL_MIN = 14; // smaller cells have no room for names
const NUMBER_MIN = 44;

export class Matrix {
  #members = [];
  #edge = 0;
  #left = 0;
  #top = 0;
  #low = 1;
  #high = 1;
  #shown = "";

  constructor() {
    this.scale = element("span", { className: "muted" });
    byId("matrix-tools").replaceChildren(this.scale);
    const box = element("div", {});
    this.drawing = new Drawing(box, "Bandwidth from each member (row) to each other (column). Arrow keys read out the numbers.", {
      size: (width) => this.#measure(width),
      draw: (context) => this.#paint(context),
      under: (x, y) => this.#under(x, y),
      move: (thing, key) => this.#move(thing, key),
      tell: (thing) => this.#tell(thing),
    });
    byId("matrix").replaceChildren(
      element("p", { className: "legend" }, "Rows send, columns receive. ", element("span", { className: "key" }, element("i", { className: "swatch ramp" }), "slow to fast"), element("span", { className: "key" }, element("i", { className: "swatch none" }), "not measured")),
      box,
    );
  }

  show(status) {
    const members = status.members.map(({ peer, name, bandwidth }) => ({ peer, name, links: bandwidth.links }));
    const key = JSON.stringify(members);
    if (key === this.#shown) return;
    this.#shown = key;
    this.#members = members;
    const rates = members.flatMap(({ links }) => Object.values(links)).filter((rate) => rate > 0);
    this.#low = Math.min(...rates, Infinity);
    this.#high = Math.max(...rates, 0);
    say(this.scale, rates.length ? `${format.rate(this.#low)} to ${format.rate(this.#high)}` : "no measurements yet");
    this.drawing.redraw();
  }

  #measure(width) {
    const count = Math.max(1, this.#members.length);
    const labelled = (width - 90) / count >= LABEL_MIN;
    this.#left = labelled ? Math.min(90, width * 0.25) : 0;
    this.#edge = Math.min(CELL_MAX, (width - this.#left) / count);
    this.#top = labelled ? 22 : 0;
    return this.#top + this.#edge * count + 2;
  }

  /** Returns a rate's place between the slowest (0) and the fastest (1), on a log scale. */
  #part(rate) {
    if (this.#high <= this.#low) return 1;
    return Math.log(rate / this.#low) / Math.log(this.#high / this.#low);
  }

  #paint(context) {
    const ink = { text: colour("ink"), muted: colour("muted"), line: colour("line"), heat: colour("accent"), surface: colour("surface") };
    const edge = this.#edge;
    const gap = edge > 8 ? 1 : 0;
    this.#members.forEach((from, row) => {
      const y = this.#top + row * edge;
      if (this.#left) {
        context.fillStyle = ink.text;
        context.textAlign = "left";
        context.fillText(fitted(context, from.name, this.#left - 6), 0, y + edge / 2);
        context.fillStyle = ink.muted;
        context.textAlign = "center";
        context.fillText(fitted(context, from.name, edge - 2), this.#left + (row + 0.5) * edge, this.#top / 2);
      }
      this.#members.forEach((to, column) => {
        const x = this.#left + column * edge;
        this.#paintCell(context, from.links[to.peer], from === to, x, y, edge - gap, ink);
      });
    });
    const picked = this.drawing.picked;
    if (picked) {
      context.strokeStyle = ink.text;
      context.lineWidth = 2;
      context.strokeRect(this.#left + picked.column * edge, this.#top + picked.row * edge, edge - gap, edge - gap);
    }
    context.textAlign = "left";
  }

  #paintCell(context, rate, self, x, y, edge, ink) {
    if (self) return;
    if (!rate) {
      context.strokeStyle = ink.line;
      context.lineWidth = 1;
      if (edge > 5) context.strokeRect(x + 0.5, y + 0.5, edge - 1, edge - 1);
      return;
    }
    const part = this.#part(rate);
    context.fillStyle = ink.heat;
    context.globalAlpha = 0.12 + 0.88 * part;
    context.fillRect(x, y, edge, edge);
    context.globalAlpha = 1;
    if (edge >= NUMBER_MIN) {
      context.fillStyle = readable(ink, 0.12 + 0.88 * part);
      context.textAlign = "center";
      const [value, unit] = format.rate(rate).split(" ");
      context.fillText(value, x + edge / 2, y + edge / 2 - 6);
      context.fillText(unit, x + edge / 2, y + edge / 2 + 7);
    }
  }

  #under(x, y) {
    const column = Math.floor((x - this.#left) / this.#edge);
    const row = Math.floor((y - this.#top) / this.#edge);
    const inside = (index) => index >= 0 && index < this.#members.length;
    return inside(row) && inside(column) ? { row, column } : null;
  }

  #move(thing, key) {
    const count = this.#members.length;
    if (count === 0) return null;
    if (thing === null || thing.row >= count || thing.column >= count) return { row: 0, column: Math.min(1, count - 1) };
    const clamp = (value) => Math.max(0, Math.min(count - 1, value));
    return {
      row: clamp(thing.row + ({ ArrowUp: -1, ArrowDown: 1 }[key] ?? 0)),
      column: clamp(thing.column + ({ ArrowLeft: -1, ArrowRight: 1 }[key] ?? 0)),
    };
  }

  #tell({ row, column }) {
    const [from, to] = [this.#members[row], this.#members[column]];
    if (!from || !to) return { text: "", x: 0, y: 0 };
    const rate = from.links[to.peer];
    let text = `${from.name} to ${to.name}: ${rate ? format.rate(rate) : "not measured"}`;
    if (from === to) text = from.name;
    return { text, x: this.#left + (column + 0.5) * this.#edge, y: this.#top + (row + 1) * this.#edge - 8 };
  }
}

/** Returns the colour, text's or surface's, with the higher contrast to a mix of heat and surface. */
function readable(ink, heat) {
  const [hot, cold] = [channels(ink.heat), channels(ink.surface)];
  const under = light(hot.map((value, index) => value * heat + cold[index] * (1 - heat)));
  const far = (name) => Math.abs(Math.log((light(channels(ink[name])) + 0.05) / (under + 0.05)));
  return far("text") > far("surface") ? ink.text : ink.surface;
}

/** Returns red, green and blue of a colour `#rrggbb`, from 0 to 1. */
const channels = (hex) => [1, 3, 5].map((from) => parseInt(hex.slice(from, from + 2), 16) / 255);

/** Returns the relative luminance. */
const light = ([red, green, blue]) => 0.2126 * red ** 2.2 + 0.7152 * green ** 2.2 + 0.0722 * blue ** 2.2;
