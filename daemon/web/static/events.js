// The run's events: newest first, filtered by kind and text, older ones on demand.

import { get } from "./api.js";
import { byId, element, say, toast } from "./dom.js";
import * as format from "./format.js";

const PAGE = 100;
const LINES_MAX = 2_000; // in the page; use the filters to see more
const FRESH_MAX = 50;
const TYPING_MS = 250;

// As in the list of events, each with its meaning.
const KINDS = [
  ["run", "the run itself: weights, pauses, restarts, the end"],
  ["join", "machines that joined"],
  ["leave", "members that left or were lost"],
  ["role", "trainers, and who contributes"],
  ["sync", "copies of the run's state"],
  ["round", "rounds that were aborted or repaired"],
  ["route", "links between members"],
  ["bad", "what was refused"],
];

export class Events {
  #kinds = new Set();
  #text = "";
  #oldest = null; // id
  #newest = 0; // the newest id in the list
  #last = 0; // the newest id seen, in the list or not
  #fresh = []; // the newest live events, which a fetched answer may lack
  #asked = 0;

  constructor() {
    const chips = KINDS.map(([kind, title]) => {
      const chip = element("button", { type: "button", className: "chip", textContent: kind, title, "aria-pressed": "false" });
      chip.dataset.kind = kind;
      chip.addEventListener("click", () => {
        const on = !this.#kinds.has(kind);
        if (on) this.#kinds.add(kind);
        else this.#kinds.delete(kind);
        chip.setAttribute("aria-pressed", String(on));
        this.#reload();
      });
      return chip;
    });
    this.search = element("input", { type: "search", placeholder: "Filter by text", "aria-label": "Filter events by text" });
    let typing = null;
    this.search.addEventListener("input", () => {
      clearTimeout(typing);
      typing = setTimeout(() => {
        this.#text = this.search.value.trim();
        this.#reload();
      }, TYPING_MS);
    });
    this.list = element("ol", { className: "events", "aria-label": "Events, newest first", tabIndex: 0 });
    this.note = element("p", { className: "empty", textContent: "No events yet." });
    this.older = element("button", { type: "button", className: "plain small", textContent: "Older events", hidden: true });
    this.older.addEventListener("click", () => this.#more());
    byId("events").replaceChildren(
      element("div", { className: "filters" }, element("div", { className: "chips", role: "group", "aria-label": "Kinds of events" }, ...chips), this.search),
      this.list,
      this.note,
      this.older,
    );
  }

  #query(more = {}) {
    return { limit: PAGE, kind: [...this.#kinds].join(","), text: this.#text, ...more };
  }

  #reload() {
    this.load().catch((error) => toast(`Loading events failed: ${error.message}`, "bad"));
  }

  async load() {
    this.#asked += 1;
    const asked = this.#asked;
    const { events } = await get("events", this.#query());
    if (asked !== this.#asked) return;
    this.list.replaceChildren(...events.map(line));
    this.#newest = events[0]?.id ?? 0;
    this.#last = Math.max(this.#last, this.#newest);
    this.#older(events);
    this.#fresh.forEach((event) => this.#put(event));
    this.#count();
  }

  async #more() {
    try {
      const { events } = await get("events", this.#query({ before: this.#oldest }));
      this.list.append(...events.map(line));
      this.#older(events);
    } catch (error) {
      toast(`Loading older events failed: ${error.message}`, "bad");
    }
  }

  #older(events) {
    this.#oldest = events.at(-1)?.id ?? this.#oldest;
    this.older.hidden = events.length < PAGE || this.list.children.length >= LINES_MAX;
  }

  /** Adds a live event. Ids have no gaps, so a missed event is noticed. */
  add(event) {
    const missed = this.#last > 0 && event.id > this.#last + 1;
    this.#last = Math.max(this.#last, event.id);
    this.#fresh.push(event);
    if (this.#fresh.length > FRESH_MAX) this.#fresh.shift();
    this.#put(event);
    this.#count();
    if (missed) this.#reload();
  }

  /** Puts an event on top if it is new and passes the filter. */
  #put(event) {
    if (event.id <= this.#newest || !this.#wanted(event)) return;
    this.#newest = event.id;
    this.list.prepend(line(event));
    while (this.list.children.length > LINES_MAX) this.list.lastElementChild.remove();
  }

  #wanted(event) {
    if (this.#kinds.size && !this.#kinds.has(event.kind)) return false;
    return `${event.name ?? ""} ${event.text}`.toLowerCase().includes(this.#text.toLowerCase());
  }

  #count() {
    const none = this.list.children.length === 0;
    this.note.hidden = !none;
    this.list.hidden = none;
    say(this.note, this.#kinds.size || this.#text ? "No event matches." : "No events yet.");
  }
}

/** Makes a line of a list of events. */
export function line(event) {
  const item = element(
    "li",
    {},
    element("time", { textContent: format.clock(event.at), dateTime: new Date(1000 * event.at).toISOString() }),
    element("span", { className: "kind", textContent: event.kind }),
    element("span", { className: "what", textContent: event.text }),
  );
  item.dataset.kind = event.kind;
  return item;
}
