// The beginning and the end of a run: how machines join an empty one, and what a finished one has come to.

import { joinCommand, signedIn } from "./actions.js";
import { byId, copyButton, element, mark, say } from "./dom.js";
import * as format from "./format.js";

const EXPORT = "holdfast export model.safetensors";

/** Shown while no machine has joined yet. */
export class Start {
  #shown = "";

  constructor() {
    this.box = byId("start");
    this.status = null;
    document.addEventListener("tokenchange", () => this.status && this.#show());
  }

  show(status) {
    this.status = status;
    const some = [status.members, status.departed, status.pending].some((rows) => rows.length > 0);
    this.box.hidden = some || status.committed > 0 || Boolean(status.ending);
    // Nothing but this is of interest then.
    mark(byId("main"), "data-empty", this.box.hidden ? null : "yes");
    if (!this.box.hidden) this.#show();
  }

  #show() {
    const now = String(signedIn());
    if (now === this.#shown) return;
    this.#shown = now;
    this.command = element("pre", { className: "command", id: "join-command" }, element("code", { textContent: "holdfast join INVITE -- python train.py" }));
    this.button = element("button", { type: "button", className: "main", textContent: "Make the join command" });
    this.button.addEventListener("click", () => this.#make());
    this.box.replaceChildren(
      element("h2", { textContent: "No machine has joined yet" }),
      element("p", {}, "On each machine that takes part, run this command in the folder of your training script:"),
      this.command,
      element("div", { className: "row" }, this.button),
      element(
        "p",
        { className: "muted" },
        ...(signedIn()
          ? ["The button makes an invite for eight machines, valid for a day."]
          : ["INVITE is what ", element("code", { textContent: "holdfast invite --founder" }), " prints at the master's machine. The button makes one here; it needs the token."]),
      ),
    );
  }

  async #make() {
    const pressed = this.button;
    pressed.disabled = true;
    const line = await joinCommand(this.status); // a token that is given meanwhile makes another button
    pressed.disabled = false;
    if (line === null) return;
    say(this.command.firstChild, line);
    this.button.replaceWith(copyButton(line, "Copy the join command"));
  }
}

/** Shown once the run is finished. */
export class Outcome {
  #shown = "";

  constructor() {
    this.box = byId("ending");
  }

  show(status) {
    const { ending, headline } = status;
    this.box.hidden = !ending;
    const now = JSON.stringify([ending, headline.tokens, status.committed]);
    if (!ending || now === this.#shown) return;
    this.#shown = now;
    const facts = [
      ["Duration", format.duration(ending.duration_s), ending.finished_at ? `until ${format.clock(ending.finished_at)}` : ""],
      ["Loss", `${format.loss(ending.loss_start)} → ${format.loss(ending.loss_end)}`, "first and last"],
      ["Tokens", format.large(headline.tokens), ending.duration_s ? `${format.large(headline.tokens / ending.duration_s)} a second` : ""],
      ["Rounds", format.count(status.committed), `step ${format.count(headline.step)}`],
    ];
    const holders = ending.weights_at;
    this.box.replaceChildren(
      element("h2", { textContent: "The run is finished" }),
      element("dl", { className: "outcome" }, ...facts.map(([name, value, remark]) => element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value }), element("dd", { className: "remark", textContent: remark })))),
      element("p", {}, holders.length ? `The final weights are in the checkpoints of ${listed(holders)}. To get a file of them, run on one of these machines:` : "The final weights are in the members' checkpoints. To get a file of them, run at a member:"),
      exportLine(EXPORT),
    );
  }
}

/** Makes the command that writes the weights into a file, with a button that copies it. */
export function exportLine(command) {
  return element("div", { className: "row" }, element("pre", { className: "command" }, element("code", { textContent: command })), copyButton(command));
}

const NAMES_MAX = 8;

function listed(names) {
  if (names.length > NAMES_MAX) return `${names.slice(0, NAMES_MAX).join(", ")} and ${names.length - NAMES_MAX} more`;
  return names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names[0];
}
