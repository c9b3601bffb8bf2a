// Machines that need a decision of the operator: pending ones, and those in quarantine.

import { byId, element, say } from "./dom.js";
import * as format from "./format.js";

/** A line with buttons for each row, rebuilt only when a row changes. */
class Lines {
  #shown = "";

  constructor(id, make) {
    this.make = make;
    this.box = byId(id);
  }

  show(rows) {
    this.box.hidden = rows.length === 0;
    const now = JSON.stringify(rows);
    if (now === this.#shown) return;
    this.#shown = now;
    this.box.replaceChildren(...rows.map((row) => this.make(row)));
  }
}

function line(tone, text, ...buttons) {
  const label = element("span");
  say(label, `${text} `);
  const made = element("p", { className: "notice" }, label, ...buttons.flatMap((button) => [button, " "]));
  if (tone) made.dataset.tone = tone;
  return made;
}

function button(title, name, className, pressed) {
  const made = element("button", { type: "button", className, textContent: title });
  made.setAttribute("aria-label", `${title} ${name}`);
  made.addEventListener("click", pressed);
  return made;
}

export class Pending {
  /** `answer(row, refuse)` is called by a line's buttons. */
  constructor(answer) {
    this.lines = new Lines("pending", (row) =>
      line(
        "",
        `${format.short(row.peer)} at ${row.host} asks to join as ${row.role}` +
          `${row.founder ? " and founder" : ""}. It calls itself “${row.name}”.`,
        button("Approve", row.name, "main small", () => answer(row, false)),
        button("Refuse…", row.name, "plain small", () => answer(row, true)),
      ),
    );
  }

  show(status) {
    const rows = status.pending ?? [];
    this.lines.show(
      rows.map(({ peer, name, host, role, founder }) => ({ peer, name, host, role, founder })),
    );
  }
}

export class Quarantine {
  /** `clear(row)` is called by a line's button. */
  constructor(clear) {
    this.lines = new Lines("quarantine", (row) =>
      line(
        row.barred ? "" : "bad",
        `${row.name} (${format.short(row.peer)}) ${row.barred ? "owns no chunks" : "is in quarantine"}: ${row.why}.`,
        button("Clear…", row.name, "plain small", () => clear(row)),
      ),
    );
  }

  show(status) {
    const names = new Map(status.members.map(({ peer, name }) => [peer, name]));
    const hidden = (peer) => ({
      peer,
      name: names.get(peer) ?? "a former member",
      why: "it repeatedly did not show the inputs of its sums",
      barred: true,
    });
    this.lines.show([...status.quarantined, ...status.barred.map(hidden)]);
  }
}
