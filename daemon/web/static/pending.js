// Who waits to be approved: a line each, with the two answers there are.

import { byId, element, say } from "./dom.js";
import * as format from "./format.js";

export class Pending {
  #shown = "";

  /** `answer(row, refuse)` is called by a line's buttons. */
  constructor(answer) {
    this.answer = answer;
    this.box = byId("pending");
  }

  show(status) {
    const rows = status.pending ?? [];
    this.box.hidden = rows.length === 0;
    const now = rows.map((row) => `${row.peer} ${row.name} ${row.host}`).join("\n");
    if (now === this.#shown) return; // buttons stay where they are
    this.#shown = now;
    this.box.replaceChildren(...rows.map((row) => this.#line(row)));
  }

  #line(row) {
    const text = element("span");
    say(text, `${row.name} (${format.short(row.peer)}) at ${row.host} wants in as ${row.role}. `);
    const button = (title, refuse, className) => {
      const made = element("button", { type: "button", className, textContent: title });
      made.setAttribute("aria-label", `${title} ${row.name}`);
      made.addEventListener("click", () => this.answer(row, refuse));
      return made;
    };
    return element(
      "p",
      { className: "notice" },
      text,
      button("Approve", false, "main small"),
      " ",
      button("Refuse…", true, "plain small"),
    );
  }
}
