// The time line of rounds: for each member when it was ready, waited, and had the result.
//
//   opened ---- ready -------- closed -------- has the result ---- ended
//     trains (pale)   waits (hatched)   reduces (solid)     until the last one has it (a thin line)

import { get } from "./api.js";
import { Drawing, colour, fitted } from "./canvas.js";
import { byId, element, toast } from "./dom.js";
import * as format from "./format.js";

const ROUNDS_MAX = 400; // in the page's memory; older ones are fetched again
const PAGE = 100; // older rounds in one request
const SPARE = 5;
const COUNTS = [10, 25, 50, 100];
const PHONE_PX = 600;
const ROW = 18;
const ROW_MANY = 12; // with more than MANY members
const MANY = 24;
const AXIS = 22;
const GAP = 3;
const SLOTS_MIN = 10; // the first rounds are no wider than so many

export class Rounds {
  #rounds = new Map(); // number -> row of /api/rounds
  #seen = new Map(); // number -> { peer: mark } of rounds in flight, as observed by this page
  #live = [];
  #shown = window.innerWidth < PHONE_PX ? COUNTS[0] : COUNTS[1];
  #end = null; // the newest round in the picture; null to follow the run
  #toScale = false;
  #slots = []; // of the last picture: { round, x, width, perSecond }
  #rows = []; // of the last picture: { peer, name }
  #exhausted = false;

  constructor() {
    this.older = element("button", { type: "button", className: "plain small", textContent: "Older" });
    this.newer = element("button", { type: "button", className: "plain small", textContent: "Newer", disabled: true });
    this.older.addEventListener("click", () => this.#goOlder());
    this.newer.addEventListener("click", () => this.#goNewer());
    const count = element(
      "select",
      { "aria-label": "Rounds in the picture" },
      ...COUNTS.map((number) => element("option", { value: number, textContent: `${number} rounds`, selected: number === this.#shown })),
    );
    count.addEventListener("change", () => {
      this.#shown = Number(count.value);
      if (this.#rounds.size < this.#shown && !this.#exhausted) this.load().catch(() => {});
      this.#draw();
    });
    const scale = element(
      "select",
      { "aria-label": "How rounds are laid out" },
      element("option", { value: "side", textContent: "side by side" }),
      element("option", { value: "time", textContent: "to scale" }),
    );
    scale.addEventListener("change", () => {
      this.#toScale = scale.value === "time";
      this.#draw();
    });
    byId("rounds-tools").replaceChildren(scale, count, this.older, this.newer);

    this.legend = element(
      "p",
      { className: "legend" },
      ...[
        ["train", "training"],
        ["wait", "waiting for others"],
        ["reduce", "averaging"],
        ["lost", "lost or left out"],
      ].map(([kind, text]) => element("span", { className: "key" }, element("i", { className: `swatch ${kind}` }), text)),
    );
    const box = element("div", { className: "scroll" });
    this.drawing = new Drawing(box, "Time line of rounds: phases per member. Arrow keys go from round to round and from member to member.", {
      size: () => AXIS + this.#rows.length * this.#rowHeight() + 4,
      draw: (context, width) => this.#paint(context, width),
      under: (x, y) => this.#under(x, y),
      move: (thing, key) => this.#move(thing, key),
      tell: (thing) => this.#tell(thing),
    });
    this.list = element("tbody");
    const table = element(
      "details",
      { className: "as-table" },
      element("summary", { textContent: "These rounds as a table" }),
      element(
        "div",
        { className: "wide" },
        element(
          "table",
          {},
          element("thead", {}, element("tr", {}, ...["Round", "Opened", "Outcome", "Ready after", "Averaged in", "Members", "Last ready", "Remarks"].map((text) => element("th", { scope: "col", textContent: text })))),
          this.list,
        ),
      ),
    );
    table.addEventListener("toggle", () => this.#fillTable());
    this.table = table;
    this.lostKey = this.legend.lastElementChild;
    byId("rounds").replaceChildren(this.legend, box, table);
  }

  /** Fetches the newest rounds again, because some may have been missed. */
  async load() {
    const limit = this.#shown + SPARE; // no more: with many members a round is some kilobytes
    const { rounds } = await get("rounds", { limit });
    const newest = rounds[0]?.round ?? -1;
    for (const number of this.#rounds.keys()) {
      if (number <= newest) this.#rounds.delete(number); // newer ones came live meanwhile
    }
    this.#exhausted = rounds.length < limit;
    rounds.forEach((row) => this.#keep(row));
    this.#draw();
  }

  /** Adds a round that has just ended. */
  add(row) {
    const missed = this.#rounds.size > 0 && row.round > Math.max(...this.#rounds.keys()) + 1;
    this.#keep(row);
    this.#seen.delete(row.round);
    this.#draw();
    // Rounds in flight may end out of order; then this request is superfluous.
    if (missed) this.load().catch(() => {});
  }

  #keep(row) {
    this.#rounds.set(row.round, row);
    if (this.#rounds.size > ROUNDS_MAX && this.#end === null) {
      this.#rounds.delete(Math.min(...this.#rounds.keys()));
      this.#exhausted = false;
    }
  }

  /** Shows the rounds in flight of a status. */
  show(status) {
    const names = new Map(status.members.map((member) => [member.peer, member.name]));
    const now = Date.now() / 1000;
    this.#live = status.rounds.map((round) => this.#inFlight(round, names, now));
    const numbers = new Set(status.rounds.map((round) => round.round));
    for (const number of this.#seen.keys()) if (!numbers.has(number)) this.#seen.delete(number);
    this.#members = status.members.map(({ peer, name }) => ({ peer, name }));
    if (this.#end === null) this.#draw();
  }

  #members = [];

  #inFlight(round, names, now) {
    const reducing = round.reduce_s !== null;
    const took = round.open_s + (round.reduce_s ?? 0);
    const marks = this.#seen.get(round.round) ?? {};
    this.#seen.set(round.round, marks);
    const taking = new Set([...round.expected, ...round.contributors.map((each) => each.peer)]);
    for (const peer of taking) {
      const reported = round.marks?.[peer];
      const mark = (marks[peer] ??= { name: names.get(peer) ?? format.short(peer), ready_s: null, reduced_s: null, state: "" });
      if (round.ready.includes(peer)) mark.ready_s ??= Math.min(took, round.open_s);
      if (round.reported.includes(peer)) mark.reduced_s ??= took;
      if (reported) Object.assign(mark, reported);
    }
    return {
      ...round,
      opened_at: now - took,
      ended_at: null,
      reduce_s: reducing ? round.reduce_s : null,
      outcome: reducing ? "averaging" : "open",
      why: "",
      marks,
    };
  }

  /** The newest committed round that this page knows. */
  get lastCommitted() {
    return [...this.#rounds.values()].filter((row) => row.outcome === "committed").reduce((a, b) => (a && a.round > b.round ? a : b), null);
  }

  // ---------------------------------------------------------------- which rounds

  #all() {
    const live = new Set(this.#live.map((round) => round.round));
    const past = [...this.#rounds.values()].filter((row) => !live.has(row.round));
    return [...past, ...this.#live].sort((a, b) => a.round - b.round);
  }

  #window() {
    const all = this.#all();
    const end = this.#end === null ? all.length : all.findIndex((row) => row.round > this.#end);
    const stop = end === -1 ? all.length : end;
    return all.slice(Math.max(0, stop - this.#shown), stop);
  }

  async #goOlder() {
    const first = this.#window()[0];
    if (!first) return;
    const all = this.#all();
    const before = all.filter((row) => row.round < first.round);
    if (before.length < this.#shown && !this.#exhausted) {
      try {
        const { rounds } = await get("rounds", { limit: PAGE, before: all[0].round });
        this.#exhausted = rounds.length < PAGE;
        this.#end = first.round - 1;
        rounds.forEach((row) => this.#keep(row));
      } catch (error) {
        toast(`Loading older rounds failed: ${error.message}`, "bad");
        return;
      }
    }
    if (this.#all()[0].round < first.round) this.#end = first.round - 1;
    this.#draw();
  }

  #goNewer() {
    const last = this.#window().at(-1);
    const after = this.#all().filter((row) => row.round > last.round);
    this.#end = after.length > this.#shown ? after[this.#shown - 1].round : null;
    this.#draw();
  }

  #draw() {
    const rounds = this.#window();
    const all = this.#all();
    this.newer.disabled = this.#end === null;
    this.older.disabled = rounds.length === 0 || (this.#exhausted && rounds[0] === all[0]);
    this.#rows = this.#rowsOf(rounds);
    this.lostKey.hidden = !rounds.some((round) => Object.values(round.marks).some(bad));
    this.drawing.redraw();
    if (this.table.open) this.#fillTable();
  }

  /** Returns the rows: present members in their order, then former members of these rounds. */
  #rowsOf(rounds) {
    const rows = new Map();
    const seen = new Map();
    for (const round of rounds) for (const [peer, mark] of Object.entries(round.marks)) seen.set(peer, mark.name);
    for (const member of this.#members) if (seen.has(member.peer)) rows.set(member.peer, member.name);
    for (const [peer, name] of seen) if (!rows.has(peer)) rows.set(peer, name);
    return [...rows].map(([peer, name]) => ({ peer, name }));
  }

  // ---------------------------------------------------------------- the picture

  #rowHeight() {
    return this.#rows.length > MANY ? ROW_MANY : ROW;
  }

  #paint(context, width) {
    const rounds = this.#window();
    const ink = {
      train: colour("train"),
      wait: colour("hatch"),
      reduce: colour("accent"),
      bad: colour("bad"),
      line: colour("line"),
      text: colour("ink"),
      muted: colour("muted"),
    };
    const label = Math.min(120, width * 0.24);
    if (rounds.length === 0) {
      context.fillStyle = ink.muted;
      context.fillText("No rounds yet.", 0, AXIS / 2);
      this.#slots = [];
      return;
    }
    this.#slots = this.#toScale ? toScale(rounds, label, width) : sideBySide(rounds, label, width);
    const height = this.#rowHeight();
    const pattern = hatch(context, ink.wait);
    this.#paintAxis(context, ink, height);
    this.#rows.forEach(({ peer, name }, index) => {
      const top = AXIS + index * height;
      context.fillStyle = ink.text;
      context.fillText(fitted(context, name, label - 8), 0, top + height / 2);
      for (const slot of this.#slots) {
        const mark = slot.round.marks[peer];
        if (mark) paintMark(context, slot, mark, top + 2, height - 4, ink, pattern);
      }
    });
    this.#paintPicked(context, ink, height);
  }

  #paintAxis(context, ink, height) {
    const bottom = AXIS + this.#rows.length * height;
    let free = 0;
    for (const slot of this.#slots) {
      const { round } = slot;
      context.fillStyle = ink.line;
      context.fillRect(slot.x - 1, AXIS - 4, 1, bottom - AXIS + 4);
      const aborted = round.outcome === "aborted";
      const text = `${aborted ? "✕ " : ""}#${round.round}`;
      if (slot.x >= free) {
        context.fillStyle = aborted ? ink.bad : ink.muted;
        context.fillText(text, slot.x, AXIS / 2 - 2);
        free = slot.x + context.measureText(text).width + 8;
      }
      if (aborted) {
        context.fillStyle = ink.bad;
        context.globalAlpha = 0.08;
        context.fillRect(slot.x, AXIS, slot.width, bottom - AXIS);
        context.globalAlpha = 1;
      }
    }
  }

  #paintPicked(context, ink, height) {
    const picked = this.drawing.picked;
    const slot = picked && this.#slots.find((each) => each.round.round === picked.round);
    const row = picked && this.#rows.findIndex((each) => each.peer === picked.peer);
    if (!slot || row < 0) return;
    context.strokeStyle = ink.text;
    context.lineWidth = 1.5;
    context.strokeRect(slot.x - 0.5, AXIS + row * height + 0.5, Math.max(slot.width - GAP + 2, 3), height - 1);
  }

  // ---------------------------------------------------------------- picking

  #under(x, y) {
    const row = this.#rows[Math.floor((y - AXIS) / this.#rowHeight())];
    const slot = [...this.#slots].reverse().find((each) => x >= each.x && x < each.x + Math.max(each.width, 4));
    return row && slot ? { peer: row.peer, round: slot.round.round } : null;
  }

  #move(thing, key) {
    if (!this.#slots.length || !this.#rows.length) return null;
    const last = { peer: this.#rows[0].peer, round: this.#slots.at(-1).round.round };
    if (thing === null) return last;
    const clamp = (value, length) => Math.max(0, Math.min(length - 1, value));
    let row = this.#rows.findIndex((each) => each.peer === thing.peer);
    let slot = this.#slots.findIndex((each) => each.round.round === thing.round);
    if (row < 0 || slot < 0) return last;
    row = clamp(row + ({ ArrowUp: -1, ArrowDown: 1 }[key] ?? 0), this.#rows.length);
    slot = clamp(slot + ({ ArrowLeft: -1, ArrowRight: 1 }[key] ?? 0), this.#slots.length);
    return { peer: this.#rows[row].peer, round: this.#slots[slot].round.round };
  }

  #tell({ peer, round: number }) {
    const slot = this.#slots.find((each) => each.round.round === number);
    const row = this.#rows.findIndex((each) => each.peer === peer);
    if (!slot || row < 0) return { text: "", x: 0, y: 0 };
    const text = markText(slot.round, peer, this.#rows[row].name);
    return { text, x: slot.x, y: AXIS + (row + 1) * this.#rowHeight() - 6 };
  }

  #fillTable() {
    if (!this.table.open) return;
    const rounds = this.#window().reverse();
    this.list.replaceChildren(
      ...rounds.map((round) => {
        const cells = [
          `#${round.round}`,
          format.clock(began(round)),
          round.outcome,
          format.duration(round.open_s),
          format.duration(round.reduce_s),
          String(Object.keys(round.marks).length),
          slowest(round),
          remarks(round),
        ];
        return element("tr", {}, ...cells.map((text) => element("td", { textContent: text })));
      }),
    );
  }
}

/** Returns a round's length so far. */
const length = (round) => (known(round) ? round.open_s + (round.reduce_s ?? 0) : Math.max(0, round.ended_at - began(round)));

/** Returns whether a round's times are known; a master that was killed has not recorded them. */
const known = (round) => round.open_s !== null;

const began = (round) => round.opened_at ?? round.ended_at;

/** Lays rounds out in slots of one width, each filled by its round: one that waited long leaves the others their room. */
function sideBySide(rounds, label, width) {
  const each = (width - label) / Math.max(rounds.length, SLOTS_MIN);
  return rounds.map((round, index) => ({
    round,
    x: label + index * each + 1,
    width: each,
    perSecond: Math.max(1, each - GAP) / Math.max(length(round), 1e-3),
  }));
}

/** Lays rounds out on a time axis, each at least a pixel wide. */
function toScale(rounds, label, width) {
  const from = began(rounds[0]);
  const to = Math.max(...rounds.map((round) => began(round) + length(round)), from + 1e-3);
  const perSecond = (width - label - 4) / (to - from);
  return rounds.map((round) => ({
    round,
    x: label + (began(round) - from) * perSecond,
    width: Math.max(1, length(round) * perSecond),
    perSecond,
  }));
}

function paintMark(context, slot, mark, top, height, ink, pattern) {
  const { round, x, perSecond } = slot;
  const end = length(round);
  const ready = mark.ready_s ?? end;
  const bar = (from, to, fill, high = height) => {
    if (to <= from) return;
    context.fillStyle = fill;
    context.fillRect(x + from * perSecond, top + (height - high) / 2, Math.max(1, (to - from) * perSecond), high);
  };
  if (!known(round)) {
    bar(0, end, ink.muted, 2);
    return;
  }
  const receives = mark.ready_s === null && mark.reduced_s !== null; // it contributes nothing
  if (receives) bar(round.open_s, mark.reduced_s, ink.reduce, height / 3);
  else bar(0, Math.min(ready, end), ink.train);
  if (mark.ready_s !== null) {
    bar(ready, Math.min(round.open_s, end), pattern);
    if (round.reduce_s !== null) {
      const reduced = mark.reduced_s ?? end;
      bar(Math.max(ready, round.open_s), reduced, ink.reduce);
      bar(reduced, end, ink.reduce, 2);
    }
  }
  if (bad(mark)) {
    const half = Math.min(4, height / 2 - 1);
    const at = x + Math.min(Math.min(mark.reduced_s ?? mark.ready_s ?? end, end) * perSecond, Math.max(half, slot.width - half - GAP));
    context.strokeStyle = ink.bad;
    context.lineWidth = 2;
    context.beginPath();
    context.moveTo(at - half, top + height / 2 - half);
    context.lineTo(at + half, top + height / 2 + half);
    context.moveTo(at + half, top + height / 2 - half);
    context.lineTo(at - half, top + height / 2 + half);
    context.stroke();
  }
}

const BAD = new Set(["excluded", "lost", "missed"]);
const bad = (mark) => BAD.has(mark.state);

function hatch(context, ink) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = ink;
  pen.lineWidth = 1.6;
  pen.beginPath();
  for (const shift of [-6, 0, 6]) {
    pen.moveTo(shift, 6);
    pen.lineTo(shift + 6, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

function markText(round, peer, name) {
  const mark = round.marks[peer];
  const parts = [`Round #${round.round}, ${name}`];
  if (!mark) return `${parts[0]}: not in this round`;
  if (!known(round)) parts.push("contributed; its times are not known");
  else if (mark.ready_s === null) parts.push(mark.reduced_s === null ? "not ready" : "contributes nothing, receives the result");
  else {
    parts.push(`ready after ${format.duration(mark.ready_s)}`);
    const waited = round.open_s - mark.ready_s;
    if (waited > 0.0005) parts.push(`waited ${format.duration(waited)}`);
  }
  if (mark.reduced_s !== null) parts.push(`had the result after ${format.duration(mark.reduced_s)}`);
  if (bad(mark)) parts.push(WORDS[mark.state]);
  const share = shareOf(round, peer);
  if (partial(share)) parts.push(inPart(share));
  const reason = round.lost?.[peer] ?? round.declined?.[peer];
  if (reason) parts.push(reason);
  return `${parts.join("; ")}. ${round.outcome}${round.why ? `: ${round.why}` : ""}`;
}

const WORDS = { excluded: "left out", lost: "lost", missed: "did not get the result" };

/** Returns the share of a committed round's chunks that contain a member's contribution. */
const shareOf = (round, peer) => round.contributors.find((each) => each.peer === peer)?.chunk_share;
const partial = (share) => share > 0 && share < 1; // others, and rows of earlier versions, are not shown
const inPart = (share) => `in ${format.percent(share)} of the chunks`;

function slowest(round) {
  const ready = Object.values(round.marks).filter((mark) => mark.ready_s !== null);
  if (!ready.length) return format.UNKNOWN;
  const last = ready.reduce((a, b) => (b.ready_s > a.ready_s ? b : a));
  return `${last.name} (${format.duration(last.ready_s)})`;
}

function remarks(round) {
  const name = (peer) => round.marks[peer]?.name ?? format.short(peer);
  const parts = round.why ? [round.why] : [];
  for (const { peer, chunk_share: share } of round.contributors) if (partial(share)) parts.push(`${name(peer)} is ${inPart(share)}`);
  for (const [peer, reason] of Object.entries(round.lost ?? {})) parts.push(`without ${name(peer)}: ${reason}`);
  for (const [peer, reason] of Object.entries(round.declined ?? {})) parts.push(`${name(peer)}: ${reason}`);
  return parts.join("; ");
}
