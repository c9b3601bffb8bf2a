// What the daemon says as it happens, through all its absences.
//
//   connecting --open--> live --error--> (asks) --no answer--> away --> (asks again)
//                          ^               | answer
//                          +---------------+--> polling, if the stream was tried just now
//
// The stream comes first: it begins with a status, and without the past, which a plain status has.
//
// Emits "status", "round", "point", "log" with the parsed value, "connection" with one of the words
// above, and "back" when what was fetched before may have holes.

import { get } from "./api.js";

const POLL_MS = 2_000; // while the stream does not work
const STREAM_AGAIN_MS = 15_000;
const AWAY_FIRST_MS = 500; // between attempts to find a daemon that is away
const AWAY_MAX_MS = 4_000;
const SILENCE_MS = 20_000; // an idle run says nothing; a line may have died without a word
const HIDDEN_MS = 30_000; // after which a page that nobody sees lets go of its stream
const SETTLED_MS = 5_000; // a stream that ended sooner is not tried again at once
const POLLS_PER_BACK = 5; // without a stream, what else is shown is fetched now and then

export class Feed extends EventTarget {
  constructor() {
    super();
    this.connection = "connecting";
    this.since = Date.now() / 1000; // of the connection's state
    this.source = null;
    this.timer = null;
    this.hiddenTimer = null;
    this.polls = 0;
    this.streamTriedMs = -Infinity;
    this.awayMs = AWAY_FIRST_MS;
    this.whole = false; // nothing was missed since the last "back"
    document.addEventListener("visibilitychange", () => this.#seen());
    window.addEventListener("pagehide", () => this.#close());
    window.addEventListener("pageshow", (event) => event.persisted && this.start());
    window.addEventListener("online", () => this.connection !== "live" && this.start());
  }

  start() {
    this.#close();
    this.#open();
  }

  #tell(type, value) {
    this.dispatchEvent(new CustomEvent(type, { detail: value }));
  }

  #become(connection) {
    if (connection === this.connection) return;
    this.connection = connection;
    this.since = Date.now() / 1000;
    this.#tell("connection", connection);
  }

  #later(milliseconds, work) {
    clearTimeout(this.timer);
    this.timer = setTimeout(work, milliseconds);
  }

  #close() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  /** One plain request: is the daemon there, and how is it? */
  async #ask() {
    let status;
    try {
      status = await get("status", { past: 0 });
    } catch {
      this.#close(); // a stream that still stands there leads to nobody
      this.whole = false;
      this.streamTriedMs = -Infinity;
      this.#become("away");
      this.#later(this.awayMs, () => this.#ask());
      this.awayMs = Math.min(2 * this.awayMs, AWAY_MAX_MS);
      return;
    }
    this.awayMs = AWAY_FIRST_MS;
    this.#tell("status", status);
    if (this.source !== null) this.#listen(); // it was only quiet
    else if (Date.now() - this.streamTriedMs > STREAM_AGAIN_MS) this.#open();
    else {
      this.#become("polling");
      this.polls += 1;
      if (this.polls % POLLS_PER_BACK === 0) this.#tell("back", null);
      this.#later(POLL_MS, () => this.#ask());
    }
  }

  #listen() {
    this.#later(SILENCE_MS, () => this.#ask());
  }

  #open() {
    this.streamTriedMs = Date.now();
    const source = new EventSource("api/live");
    this.source = source;
    source.addEventListener("open", () => {
      this.#become("live");
      this.awayMs = AWAY_FIRST_MS;
      if (!this.whole) this.#tell("back", null);
      this.whole = true;
      this.#listen();
    });
    for (const type of ["status", "round", "point", "log"]) {
      source.addEventListener(type, (event) => {
        this.#listen();
        this.#tell(type, JSON.parse(event.data));
      });
    }
    source.addEventListener("error", () => {
      // The browser would try again by itself, but neither says why nor for how long.
      const lived = this.connection === "live" && Date.now() - this.streamTriedMs > SETTLED_MS;
      source.close();
      if (source !== this.source) return;
      this.source = null;
      this.whole = false;
      if (lived) this.streamTriedMs = -Infinity;
      this.#ask();
    });
    this.#listen();
  }

  #seen() {
    clearTimeout(this.hiddenTimer);
    if (document.hidden) {
      this.hiddenTimer = setTimeout(() => this.#close(), HIDDEN_MS);
    } else if (this.source === null) {
      this.whole = false;
      this.streamTriedMs = -Infinity;
      this.start();
    }
  }
}
