// Machines that need a decision of the operator: pending ones.

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
