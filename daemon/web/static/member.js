// The page of one member at the master: `#member=NAME`. Its figures, curves and events.

import { get } from "./api.js";
import { byId, element, say } from "./dom.js";
import { line as eventLine } from "./events.js";
import * as format from "./format.js";
import { Figures } from "./headline.js";
import { MemberCharts } from "./member_charts.js";

const EVENTS = 50;
const FIGURES = ["Role", "Step", "Loss", "Tokens/s", "Utilisation", "Sent", "Received", "Connected for"];

/** Returns the address of a member's page: by name, or by id if another one has its name. */
export function linkTo(member, members) {
  const alone = members.filter((each) => each.name === member.name).length === 1;
  return `#${new URLSearchParams({ member: alone ? member.name : member.peer })}`;
}

export class MemberPage {
  #wanted; // name or id
  #peer = null; // its id, once it is known

  /** `actions`: functions of a member, by the text of the button beside what is odd about it. */
  constructor(wanted, actions) {
    this.#wanted = wanted;
    const back = element("a", { href: "#", className: "back", textContent: "← The run" });
    this.title = element("h2", { className: "member-title", textContent: wanted });
    this.word = element("span", { className: "muted" });
    this.why = element("p", { className: "muted", hidden: true });
    this.odd = element("span");
    const buttons = Object.entries(actions).flatMap(([textContent, act]) => {
      const button = element("button", { type: "button", className: "plain small", textContent });
      button.addEventListener("click", () => act(this.found));
      return [" ", button];
    });
    this.suspicion = element("p", { className: "suspicion", hidden: true }, this.odd, ...buttons);
    this.suspicion.dataset.tone = "bad";
    const list = element("dl", { className: "figures" });
    this.figures = new Figures(list, FIGURES);
    this.charts = new MemberCharts(() => ({ peer: this.#peer ?? wanted }));
    this.note = element("p", { className: "notice", hidden: true });
    this.note.dataset.tone = "calm";
    this.events = element("ol", { className: "events", tabIndex: 0, "aria-label": "Events of this member, newest first" });
    this.noEvents = element("p", { className: "empty", textContent: "No events." });
    this.box = byId("member");
    this.box.replaceChildren(
      element("div", { className: "member-head" }, back, this.title, this.word),
      this.why,
      this.suspicion,
      list,
      this.note,
      this.charts.box,
      card("Events", [this.events, this.noEvents]),
    );
  }

  /** Shows what a status of the run says about the member. */
  show(status) {
    const wanted = this.#peer ?? this.#wanted;
    const found = find(status.members, wanted) ?? find([...status.departed].reverse(), wanted);
    if (!found) return;
    this.#peer = found.peer;
    this.found = found;
    this.suspicion.hidden = !found.suspicion;
    this.suspicion.classList.toggle("notice", Boolean(found.suspicion));
    say(this.odd, found.suspicion);
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
    const [curves] = await Promise.allSettled([this.charts.load(), this.#loadEvents()]);
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
    this.box.replaceChildren();
  }
}

const find = (rows, wanted) => rows.find((row) => row.peer === wanted) ?? rows.find((row) => row.name === wanted);

const card = (title, content) =>
  element("section", { className: "card", "aria-label": title }, element("div", { className: "title" }, element("h2", { textContent: title })), ...content);
