// The members: a table that becomes a list of cards on a phone.

import { lag, place, shares, StepTimes, version } from "./derive.js";
import { byId, element, mark, say } from "./dom.js";
import * as format from "./format.js";
import { linkTo } from "./member.js";

// A column: its heading, its text, its sort key, its alignment and its tooltip.
const COLUMNS = [
  { key: "number", title: "#", text: (row) => String(row.number), sort: (row) => row.number },
  { key: "name", title: "Name", text: (row) => row.name, sort: (row) => row.name.toLowerCase(), hint: (row) => row.peer, link: (row) => row.link },
  { key: "role", title: "Role", text: (row) => row.role, sort: (row) => row.role },
  { key: "place", title: "Round", text: (row) => row.place, sort: (row) => row.place },
  { key: "loss", title: "Loss", text: (row) => format.loss(row.loss), sort: (row) => row.loss, number: true },
  { key: "step", title: "Step time", text: (row) => format.duration(row.stepTime), sort: (row) => row.stepTime, number: true },
  { key: "speed", title: "Tokens/s", text: (row) => format.large(row.speed), sort: (row) => row.speed, number: true },
  { key: "weight", title: "Weight", text: (row) => format.percent(row.weight), sort: (row) => row.weight, number: true },
  { key: "up", title: "Up", text: (row) => format.rate(row.up), sort: (row) => row.up, number: true },
  { key: "down", title: "Down", text: (row) => format.rate(row.down), sort: (row) => row.down, number: true },
  { key: "lag", title: "Lag", text: (row) => row.lag, sort: (row) => row.lagSteps, number: true, hint: (row) => row.lagText },
  { key: "version", title: "Version", text: (row) => format.count(row.version), sort: (row) => row.version, number: true },
  { key: "software", title: "Software", text: (row) => row.software, sort: (row) => row.software },
  { key: "uptime", title: "Connected for", text: (row) => format.duration(row.uptime), sort: (row) => row.uptime, number: true },
  { key: "why", title: "Notes", text: (row) => row.why, sort: (row) => row.why },
];

/** Shows whether all copies are equal, and since when that is known. */
export function showCopies({ text, unequal, compared_s: age }) {
  const place = byId("copies-equal");
  place.hidden = !text;
  mark(place, "title", unequal.map(({ name, why }) => `${name}: ${why}`).join("\n") || null);
  say(place, age === null ? text : `${text} (compared ${format.duration(age)} ago)`);
}

export class Members {
  #rows = new Map(); // peer -> { tr, cells }
  #times = new StepTimes();
  #sorted = { key: "number", up: true };
  #status = null;
  #round = null;

  /** `kick(member)` is called by a row's button. */
  constructor(kick) {
    this.kick = kick;
    this.head = new Map();
    const headings = COLUMNS.map((column) => {
      const button = element("button", { type: "button", className: "sort", textContent: column.title });
      button.addEventListener("click", () => this.#sort(column.key));
      const cell = element("th", { scope: "col", role: "columnheader", className: column.number ? "number" : "" }, button);
      this.head.set(column.key, cell);
      return cell;
    });
    const last = element("th", { scope: "col", role: "columnheader" }, element("span", { className: "unseen", textContent: "Actions" }));
    this.body = element("tbody", { role: "rowgroup" });
    const table = element(
      "table",
      { className: "members", role: "table", "aria-labelledby": "members-title" },
      element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...headings, last)),
      this.body,
    );
    this.box = element("div", { className: "wide", tabIndex: 0, role: "region", "aria-label": "Table of members" }, table);
    // On a phone there are no headings to press.
    this.select = element(
      "select",
      { "aria-label": "Sort members by" },
      ...COLUMNS.map(({ key, title }) => element("option", { value: key, textContent: `by ${title.toLowerCase()}` })),
    );
    this.select.addEventListener("change", () => this.#sort(this.select.value));
    this.counts = element("span", { className: "muted" });
    this.gone = element("div", { className: "gone" });
    byId("members-tools").replaceChildren(this.counts, this.select);
    this.none = element("p", { className: "empty", hidden: true });
    byId("members").replaceChildren(this.box, this.none, this.gone);
    this.#showSort();
  }

  #sort(key) {
    const up = this.#sorted.key === key ? !this.#sorted.up : true;
    this.#sorted = { key, up };
    this.#showSort();
    if (this.#status) this.show(this.#status, this.#round);
  }

  #showSort() {
    for (const [key, cell] of this.head) {
      const sorted = key === this.#sorted.key;
      mark(cell, "aria-sort", sorted ? (this.#sorted.up ? "ascending" : "descending") : "none");
    }
    this.select.value = this.#sorted.key;
  }

  /** `round` is the last committed one, or null. */
  show(status, round) {
    this.#status = status;
    this.#round = round;
    showCopies(status.copies);
    const weights = shares(round);
    // A peer that came back is a member again.
    const departed = status.departed.filter((gone) => !status.members.some((here) => here.peer === gone.peer));
    const lost = new Map(departed.filter(({ gone_s: since }) => since < GONE_S).map((gone) => [gone.peer, gone]));
    const rows = status.members.map((member) => this.#facts(status, member, weights));
    rows.push(...[...lost.values()].map((member) => ({ ...this.#facts(status, member, weights), ...GONE, why: `${member.why}, ${format.duration(member.gone_s)} ago` })));
    this.#order(rows);
    this.box.classList.toggle("tall", rows.length > MANY);
    const here = new Set(rows.map((row) => row.peer));
    for (const [peer, { tr }] of this.#rows) {
      if (here.has(peer)) continue;
      tr.remove();
      this.#rows.delete(peer);
    }
    rows.forEach((row, index) => this.#showRow(row, index));
    const { counts } = status;
    this.box.hidden = rows.length === 0;
    this.none.hidden = rows.length > 0;
    say(this.none, status.state === "finished" ? "The run is finished, and its members have left." : "No member is connected.");
    say(this.counts, `${counts.live} connected, ${counts.participating} can contribute, ${counts.contributed} in the last round`);
    this.#showGone(departed.filter(({ peer }) => !lost.has(peer)));
  }

  #facts(status, member, weights) {
    this.#times.note(member);
    const word = place(status, member);
    const behind = lag(status, member);
    const contributes = member.role === "contributor" && member.trainer;
    const bandwidth = member.bandwidth;
    return {
      peer: member.peer,
      name: member.name,
      link: linkTo(member, status.members),
      number: member.number,
      role: member.role,
      place: word,
      placeKind: word,
      tone: toneOf(member, word),
      loss: contributes ? member.loss : null,
      stepTime: contributes ? this.#times.of(member) : null,
      speed: contributes ? member.tokens_per_s : null,
      weight: weights.get(member.peer) ?? null,
      up: bandwidth.up_bytes_per_s,
      down: bandwidth.down_bytes_per_s,
      lag: lagTexts(behind)[0] ?? "none",
      lagText: lagTexts(behind).join(", "),
      lagSteps: 1e9 * behind.versions + (behind.steps ?? 0),
      version: version(member),
      software: member.software,
      uptime: member.attached_s,
      why: [member.suspicion, member.why, fewer(member.accelerators)].filter(Boolean).join("; ") || limits(bandwidth) || (member.reach === "outbound" ? "not reachable from outside: it dials the others" : ""),
    };
  }

  #order(rows) {
    const { sort } = COLUMNS.find((column) => column.key === this.#sorted.key);
    const sign = this.#sorted.up ? 1 : -1;
    rows.sort((a, b) => {
      const [x, y] = [sort(a), sort(b)];
      if (x === y) return a.number - b.number;
      if (x === null || x === undefined || x === "") return 1; // unknown values come last in both directions
      if (y === null || y === undefined || y === "") return -1;
      return sign * (x < y ? -1 : 1);
    });
  }

  #showRow(row, index) {
    let known = this.#rows.get(row.peer);
    if (!known) {
      known = this.#makeRow(row);
      this.#rows.set(row.peer, known);
    }
    const { tr, cells } = known;
    for (const column of COLUMNS) {
      const cell = cells.get(column.key);
      say(cell.value, column.text(row));
      if (column.link) mark(cell.value, "href", column.link(row));
      if (column.hint) mark(cell.td, "title", column.hint(row));
    }
    mark(tr, "data-tone", row.tone);
    tr.querySelector("button").hidden = row.place === GONE.place;
    mark(tr, "data-place", row.placeKind);
    const there = this.body.children[index];
    if (there !== tr) this.body.insertBefore(tr, there ?? null);
  }

  #makeRow(row) {
    const cells = new Map();
    const tds = COLUMNS.map((column) => {
      const value = element(column.link ? "a" : "span", { className: "value" });
      const td = element("td", { role: "cell", className: column.number ? "number" : "" }, value);
      td.dataset.title = column.title;
      td.dataset.key = column.key;
      cells.set(column.key, { td, value });
      return td;
    });
    const button = element("button", { type: "button", className: "plain small", textContent: "Kick…" });
    button.setAttribute("aria-label", `Kick ${row.name}`);
    button.addEventListener("click", () => this.kick(row));
    const tr = element("tr", { role: "row" }, ...tds, element("td", { role: "cell", className: "row-actions" }, button));
    tr.dataset.peer = row.peer;
    return { tr, cells };
  }

  #showGone(departed) {
    this.gone.hidden = departed.length === 0;
    const last = [...departed].reverse().slice(0, GONE_MAX);
    const lines = last.map((member) => [linkTo(member, departed), member.name, ` (${format.short(member.peer)}): ${member.why}`]);
    const now = JSON.stringify(lines);
    if (this.gone.dataset.lines === now) return;
    this.gone.dataset.lines = now;
    this.gone.replaceChildren(
      element("h3", { textContent: "Former members" }),
      element("ul", {}, ...lines.map(([href, name, text]) => element("li", {}, element("a", { href, textContent: name }), text))),
    );
  }
}

const GONE_S = 600; // for so long a member that has left stays a row
const GONE = { role: "–", place: "gone", placeKind: "gone", tone: "bad", loss: null, stepTime: null, speed: null, lag: "", lagSteps: null, up: null, down: null, version: null, uptime: null };
const GONE_MAX = 8;
const MANY = 16; // members; a longer table scrolls in a box

function toneOf(member, word) {
  if (word === "lost" || word === "not in round" || member.draining) return "bad";
  if (!member.in_sync || (member.role === "contributor" && !member.trainer)) return "wait";
  return member.role === "contributor" ? "ok" : "idle";
}

/** Returns what a member is behind in, versions before steps. */
function lagTexts({ versions, steps }) {
  const texts = [];
  if (versions > 0) texts.push(`${versions} version${versions === 1 ? "" : "s"}`);
  if (steps > 0) texts.push(`${format.count(steps)} step${steps === 1 ? "" : "s"}`);
  return texts;
}

/** Returns "7 of 8 GPUs" if they are not all healthy. */
function fewer(accelerators) {
  const counts = [...accelerators.matchAll(/(\d+) of (\d+) /g)];
  return counts.some(([, there, all]) => there !== all) ? accelerators : "";
}

/** Returns the bandwidth limits that the machine's owner has set. */
function limits(bandwidth) {
  const { upload_cap_bytes_per_s: up, download_cap_bytes_per_s: down } = bandwidth;
  const texts = [];
  if (up) texts.push(`upload limit ${format.rate(up)}`);
  if (down) texts.push(`download limit ${format.rate(down)}`);
  return texts.join(", ");
}
