// The feed of messages from the daemon; it survives the daemon's restarts.
//
//   connecting --open--> live --error--> (polls) --no answer--> away --> (polls)
//                          ^               | answer
//                          +---------------+--> polling, if the stream was tried just now
//
// The stream is opened first: it begins with a status, without the past that a plain status has.
//
// Emits "status", "round", "point", "sample", "log" with the parsed value, "connection" with one of the words
// above, and "back" when messages may have been missed.

import { get } from "./api.js";

const POLL_MS = 2_000; // while the stream does not work
const STREAM_AGAIN_MS = 15_000;
const AWAY_FIRST_MS = 500; // between requests to a daemon that does not answer
const AWAY_MAX_MS = 4_000;
const SILENCE_MS = 20_000; // then check whether the run is idle or the connection dead
const HIDDEN_MS = 30_000; // until a hidden page closes its stream
const SETTLED_MS = 5_000; // a stream that ended sooner is not reopened at once
const POLLS_PER_BACK = 5; // without a stream, everything is fetched again after this many polls

export class Feed extends EventTarget {
  constructor() {
    super();
    this.connection = "connecting";
    this.since = Date.now() / 1000; // the start of the connection's state
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

  /** Fetches the status once, to learn whether the daemon answers. */
  async #ask() {
    let status;
    try {
      status = await get("status", { past: 0 });
    } catch {
      this.#close(); // a stream that is still open is dead
      this.whole = false;
      this.streamTriedMs = -Infinity;
      this.#become("away");
      this.#later(this.awayMs, () => this.#ask());
      this.awayMs = Math.min(2 * this.awayMs, AWAY_MAX_MS);
      return;
    }
    this.awayMs = AWAY_FIRST_MS;
    this.#tell("status", status);
    if (this.source !== null) this.#listen(); // the run was only idle
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
    for (const type of ["status", "round", "point", "sample", "log"]) {
      source.addEventListener(type, (event) => {
        this.#listen();
        this.#tell(type, JSON.parse(event.data));
      });
    }
    source.addEventListener("error", () => {
      // The browser would reconnect by itself, but tells neither the reason nor the delay.
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
