// The page of one member at the master: `#member=NAME`. Its figures, curves, events and log.

import { askForToken, REFUSED, signedIn } from "./actions.js";
import { get, getPrivate, token } from "./api.js";
import { byId, element, mark, say } from "./dom.js";
import { line as eventLine } from "./events.js";
import * as format from "./format.js";
import { Figures } from "./headline.js";
import { MemberCharts } from "./member_charts.js";

const EVENTS = 50;
const LOG_LINES = 200;
const LOG_MS = 5_000; // between two requests for the log, while the page is visible
const FIGURES = ["Role", "Step", "Loss", "Tokens/s", "Utilisation", "Sent", "Received", "Connected for"];

/** Returns the address of a member's page: by name, or by id if another one has its name. */
export function linkTo(member, members) {
  const alone = members.filter((each) => each.name === member.name).length === 1;
  return `#${new URLSearchParams({ member: alone ? member.name : member.peer })}`;
}

export class MemberPage {
  #wanted; // name or id
  #peer = null; // its id, once it is known
  #timer = null;
  #problem = ""; // with the last token
  #ended = false;

  constructor(wanted) {
    this.#wanted = wanted;
    const back = element("a", { href: "#", className: "back", textContent: "← The run" });
    this.title = element("h2", { className: "member-title", textContent: wanted });
    this.word = element("span", { className: "muted" });
    this.why = element("p", { className: "muted", hidden: true });
    const list = element("dl", { className: "figures" });
    this.figures = new Figures(list, FIGURES);
    this.charts = new MemberCharts(() => ({ peer: this.#peer ?? wanted }));
    this.note = element("p", { className: "notice", hidden: true });
    this.note.dataset.tone = "calm";
    this.events = element("ol", { className: "events", tabIndex: 0, "aria-label": "Events of this member, newest first" });
    this.noEvents = element("p", { className: "empty", textContent: "No events." });
    this.log = element("ol", { className: "log", tabIndex: 0, role: "log", "aria-live": "off", "aria-label": "Log of this member" });
    this.noLog = element("p", { className: "empty", id: "member-no-log", textContent: "Loading the log …" });
    this.again = element("button", { type: "button", className: "plain small", textContent: "Load again" });
    this.again.addEventListener("click", async () => {
      if (signedIn() || (await askForToken(this.#problem))) this.#loadLog();
    });
    this.box = byId("member");
    this.box.replaceChildren(
      element("div", { className: "member-head" }, back, this.title, this.word),
      this.why,
      list,
      this.note,
      this.charts.box,
      card("Events", [this.events, this.noEvents]),
      card("Log", [this.log, this.noLog], this.again),
    );
  }

  /** Shows what a status of the run says about the member. */
  show(status) {
    const wanted = this.#peer ?? this.#wanted;
    const found = find(status.members, wanted) ?? find([...status.departed].reverse(), wanted);
    if (!found) return;
    this.#peer = found.peer;
    const here = status.members.includes(found);
    say(this.title, found.name);
    say(this.word, `${format.short(found.peer)}${here ? ` · member ${found.number}` : " · not connected"}`);
    this.why.hidden = !found.why;
    say(this.why, found.why);
    const { figures } = this;
    const all = found.stepped_s + found.waited_s;
    figures.set("Role", here ? found.role : "gone", here ? (found.in_sync ? "in sync" : "not in sync") : "not connected");
    figures.set("Step", format.count(found.step), `${format.large(found.tokens)} tokens`);
    figures.set("Loss", format.loss(found.loss));
    figures.set("Tokens/s", format.large(here ? found.tokens_per_s : null), here ? found.accelerators : "");
    figures.set("Utilisation", format.percent(all ? found.stepped_s / all : null), "since its start");
    figures.set("Sent", format.bytes(found.bytes.bulk_sent), `up ${format.rate(found.bandwidth.up_bytes_per_s)}`);
    figures.set("Received", format.bytes(found.bytes.bulk_received), `down ${format.rate(found.bandwidth.down_bytes_per_s)}`);
    figures.set("Connected for", format.duration(found.attached_s), here && found.trainer_state ? `trainer: ${found.trainer_state}` : "");
  }

  async load() {
    const [curves] = await Promise.allSettled([this.charts.load(), this.#loadEvents(), this.#loadLog()]);
    const failed = curves.status === "rejected";
    this.note.hidden = !failed;
    if (failed) say(this.note, `No curves: ${curves.reason.message}.`);
  }

  async #loadEvents() {
    const query = this.#peer ? { peer: this.#peer } : { text: this.#wanted };
    const { events } = await get("events", { ...query, limit: EVENTS });
    this.events.replaceChildren(...events.map(eventLine));
    this.noEvents.hidden = events.length > 0;
    this.events.hidden = events.length === 0;
  }

  async #loadLog() {
    clearTimeout(this.#timer);
    if (!signedIn()) return this.#askToSignIn("What a machine prints may be private: the log needs the token.");
    try {
      const { lines } = await getPrivate("logs", { peer: this.#peer ?? this.#wanted, lines: LOG_LINES });
      if (this.#ended) return;
      this.#problem = "";
      const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 30;
      this.log.replaceChildren(...lines.map(logLine));
      this.log.hidden = lines.length === 0;
      this.noLog.hidden = lines.length > 0;
      say(this.noLog, "No lines yet.");
      if (atEnd) this.log.scrollTop = this.log.scrollHeight;
      this.again.hidden = true;
      this.#timer = setTimeout(() => this.#loadLog(), LOG_MS);
    } catch (error) {
      if (error.refused) {
        token.forget();
        this.#problem = REFUSED;
        this.#askToSignIn(REFUSED);
        return;
      }
      // What was loaded before stays.
      this.noLog.hidden = false;
      say(this.again, "Load again");
      say(this.noLog, `The log cannot be shown: ${error.message}.`);
      this.log.hidden = this.log.children.length === 0;
      this.again.hidden = false;
    }
  }

  #askToSignIn(why) {
    this.log.hidden = true;
    this.noLog.hidden = this.again.hidden = false;
    say(this.noLog, why);
    say(this.again, "Sign in …");
  }

  /** Takes live points and events of the run. */
  sample(rows) {
    for (const row of rows) if (row.peer === this.#peer) this.charts.add(row);
  }

  addEvent(event) {
    if (event.peer !== this.#peer) return;
    this.events.prepend(eventLine(event));
    this.events.hidden = false;
    this.noEvents.hidden = true;
    while (this.events.children.length > EVENTS) this.events.lastElementChild.remove();
  }

  end() {
    this.#ended = true;
    clearTimeout(this.#timer);
    this.box.replaceChildren();
  }
}

const find = (rows, wanted) => rows.find((row) => row.peer === wanted) ?? rows.find((row) => row.name === wanted);

function logLine({ at, source, text }) {
  const item = element("li", {}, element("time", { textContent: format.clock(at), dateTime: new Date(1000 * at).toISOString() }), element("span", { className: "source", textContent: source }), element("span", { className: "what", textContent: text }));
  mark(item, "data-source", source);
  return item;
}

const card = (title, content, tool = null) =>
  element("section", { className: "card", "aria-label": title }, element("div", { className: "title" }, element("h2", { textContent: title }), element("span", { className: "title-tools" }, tool)), ...content);
