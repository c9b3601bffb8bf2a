// The measured bandwidth of each pair as a heat map; a pointer or the arrow keys read the numbers.

import { Drawing, colour, fitted } from "./canvas.js";
import { byId, element, say } from "./dom.js";
import * as format from "./format.js";

const CELL_WIDE_MAX = 220;
const CELL_HIGH_MAX = 56;
const MEMBERS_MIN = 3; // the rates of one pair are said in words
const LABEL_MIN = 14; // smaller cells have no room for names
const NUMBER_WIDE_MIN = 44;
const NUMBER_HIGH_MIN = 30;
const PAIRS_MAX = 4_000; // whose last rate is kept; with more members only the newest rates are shown
const AGED_S = 1; // a rate that the last status had no more
const AGED = 0.45; // of its colour

export class Matrix {
  #members = [];
  #known = new Map(); // "from to" -> { rate, at }: not each round uses each link
  #wide = 0;
  #high = 0;
  #left = 0;
  #top = 0;
  #slowest = 1;
  #fastest = 1;
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
    this.none = element("p", { className: "empty" });
    this.agedKey = key("aged", "not in the last round");
    this.legend = element("p", { className: "legend" }, "Rows send, columns receive. ", key("ramp", "slow to fast"), key("none", "not measured"), this.agedKey);
    this.box = box;
    byId("matrix").replaceChildren(this.none, this.legend, box);
  }

  show(status) {
    const members = status.members.map(({ peer, name, bandwidth }) => ({ peer, name, links: bandwidth.links }));
    const key = JSON.stringify(members);
    if (key === this.#shown) return;
    this.#shown = key;
    this.#members = members;
    this.#learn(members);
    const rates = [...this.#known.values()].map(({ rate }) => rate);
    this.#slowest = Math.min(...rates, Infinity);
    this.#fastest = Math.max(...rates, 0);
    const some = rates.length > 0;
    const many = members.length >= MEMBERS_MIN;
    this.none.hidden = some && many;
    say(this.none, some ? this.#pairs().join(", ") : "Nothing is known of the members that are here: rounds of two or more measure it.");
    this.legend.hidden = this.box.hidden = !some || !many;
    this.agedKey.hidden = ![...this.#known.values()].some(({ at }) => this.#learnt - at > AGED_S);
    say(this.scale, some && many ? `${format.rate(this.#slowest)} to ${format.rate(this.#fastest)}` : "");
    this.drawing.redraw();
  }

  /** Keeps the last rate of each pair of members. */
  #learn(members) {
    const here = new Set(members.map(({ peer }) => peer));
    const keep = members.length ** 2 <= PAIRS_MAX;
    for (const pair of this.#known.keys()) {
      if (!keep || pair.split(" ").some((peer) => !here.has(peer))) this.#known.delete(pair);
    }
    const at = Date.now() / 1000;
    for (const { peer, links } of members) {
      for (const [to, rate] of Object.entries(links)) if (rate > 0) this.#known.set(`${peer} ${to}`, { rate, at });
    }
    this.#learnt = at;
  }

  /** Returns the known rates in words. */
  #pairs() {
    const pairs = this.#members.flatMap((from) => this.#members.map((to) => [from, to, this.#rate(from, to)]));
    return pairs.filter(([, , known]) => known).map(([from, to, { rate }]) => `${from.name} to ${to.name}: ${format.rate(rate)}`);
  }

  #learnt = 0; // when the last rates came

  /** Returns the rate from one member to another, and how old it is in seconds; null if it is not known. */
  #rate(from, to) {
    const known = this.#known.get(`${from.peer} ${to.peer}`);
    return known ? { rate: known.rate, age: this.#learnt - known.at } : null;
  }

  #measure(width) {
    const count = Math.max(1, this.#members.length);
    const labelled = (width - 90) / count >= LABEL_MIN;
    this.#left = labelled ? Math.min(90, width * 0.25) : 0;
    this.#wide = Math.min(CELL_WIDE_MAX, (width - this.#left) / count);
    this.#high = Math.min(CELL_HIGH_MAX, this.#wide);
    this.#top = labelled ? 22 : 0;
    return this.#top + this.#high * count + 2;
  }

  /** Returns a rate's place between the slowest (0) and the fastest (1), on a log scale. */
  #part(rate) {
    if (this.#fastest <= this.#slowest) return 1;
    return Math.log(rate / this.#slowest) / Math.log(this.#fastest / this.#slowest);
  }

  #paint(context) {
    const ink = { text: colour("ink"), muted: colour("muted"), line: colour("line"), heat: colour("accent"), surface: colour("surface") };
    const [wide, high] = [this.#wide, this.#high];
    const gap = high > 8 ? 1 : 0;
    this.#members.forEach((from, row) => {
      const y = this.#top + row * high;
      if (this.#left) {
        context.fillStyle = ink.text;
        context.textAlign = "left";
        context.fillText(fitted(context, from.name, this.#left - 6), 0, y + high / 2);
        context.fillStyle = ink.muted;
        context.textAlign = "center";
        context.fillText(fitted(context, from.name, wide - 2), this.#left + (row + 0.5) * wide, this.#top / 2);
      }
      this.#members.forEach((to, column) => {
        const x = this.#left + column * wide;
        if (from !== to) this.#paintCell(context, this.#rate(from, to), [x, y, wide - gap, high - gap], ink);
      });
    });
    const picked = this.drawing.picked;
    if (picked) {
      context.strokeStyle = ink.text;
      context.lineWidth = 2;
      context.strokeRect(this.#left + picked.column * wide, this.#top + picked.row * high, wide - gap, high - gap);
    }
    context.textAlign = "left";
  }

  #paintCell(context, known, [x, y, wide, high], ink) {
    if (known === null) {
      context.strokeStyle = ink.line;
      context.lineWidth = 1;
      if (high > 5) context.strokeRect(x + 0.5, y + 0.5, wide - 1, high - 1);
      return;
    }
    const heat = (0.12 + 0.88 * this.#part(known.rate)) * (known.age > AGED_S ? AGED : 1);
    context.fillStyle = ink.heat;
    context.globalAlpha = heat;
    context.fillRect(x, y, wide, high);
    context.globalAlpha = 1;
    if (wide >= NUMBER_WIDE_MIN && high >= NUMBER_HIGH_MIN) {
      context.fillStyle = readable(ink, heat);
      context.textAlign = "center";
      const [value, unit] = format.rate(known.rate).split(" ");
      context.fillText(value, x + wide / 2, y + high / 2 - 6);
      context.fillText(unit, x + wide / 2, y + high / 2 + 7);
    }
  }

  #under(x, y) {
    const column = Math.floor((x - this.#left) / this.#wide);
    const row = Math.floor((y - this.#top) / this.#high);
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
    const known = this.#rate(from, to);
    const aged = known && known.age > AGED_S ? `, measured ${format.duration(known.age)} ago` : "";
    let text = `${from.name} to ${to.name}: ${known ? format.rate(known.rate) + aged : "not measured"}`;
    if (from === to) text = from.name;
    return { text, x: this.#left + (column + 0.5) * this.#wide, y: this.#top + (row + 1) * this.#high - 8 };
  }
}

const key = (kind, text) => element("span", { className: "key" }, element("i", { className: `swatch ${kind}` }), text);

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
