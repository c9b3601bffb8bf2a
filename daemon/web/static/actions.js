// The operator's actions. Each needs the bearer token, which is asked for when first needed.

import { ApiError, get, post, token } from "./api.js";
import { byId, copyButton, element, toast } from "./dom.js";
import * as format from "./format.js";

/** Shows a dialog with a form. Resolves to the form's values, or null if it was cancelled. */
function ask(title, parts, submit, { danger = false, problem = "" } = {}) {
  return new Promise((resolve) => {
    const ok = element("button", { type: "submit", className: danger ? "danger" : "main", textContent: submit });
    const no = element("button", { type: "button", className: "plain", textContent: "Cancel" });
    const form = element(
      "form",
      { method: "dialog" },
      element("h2", { textContent: title, id: "dialog-title" }),
      problem ? element("p", { className: "problem", role: "alert", textContent: problem }) : null,
      ...parts,
      element("div", { className: "buttons" }, no, ok),
    );
    const dialog = element("dialog", { "aria-labelledby": "dialog-title" }, form);
    let answer = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      answer = Object.fromEntries(new FormData(form));
      dialog.close();
    });
    no.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(answer);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

function tell(title, ...parts) {
  const close = element("button", { type: "button", className: "main", textContent: "Close" });
  const dialog = element(
    "dialog",
    { "aria-labelledby": "dialog-title" },
    element("h2", { textContent: title, id: "dialog-title" }),
    ...parts,
    element("div", { className: "buttons" }, close),
  );
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

let fields = 0;

function field(text, control) {
  fields += 1;
  control.id = `field-${fields}`;
  return element("p", { className: "field" }, element("label", { for: control.id, textContent: text }), control);
}

const REFUSED = "The daemon refused this token. It makes a new one at each start.";

/** Returns whether this tab has a token. */
export const signedIn = () => token.get() !== null;

/** Returns where the token is: the path of its file, if the daemon tells it. */
async function tokenPlace() {
  const { path } = await get("token-file").catch(() => ({ path: null }));
  if (path) return [element("code", { textContent: path })];
  return [element("code", { textContent: "control.json" }), " in the daemon's state directory"];
}

/** Asks for the token. Returns whether one was given. */
async function askForToken(problem) {
  const input = element("input", { type: "password", name: "token", required: true, autocomplete: "off", spellcheck: false });
  const given = await ask(
    "Bearer token",
    [
      element(
        "p",
        {},
        "Actions need the token that this daemon made at its start: ",
        element("code", { textContent: "holdfast dashboard" }),
        " at its machine opens this page with it. Or copy it here: it is the entry ",
        element("code", { textContent: "token" }),
        " of ",
        ...(await tokenPlace()),
        ". This tab forgets it when it is closed.",
      ),
      field("Token", input),
    ],
    "Use token",
    { problem },
  );
  if (given === null) return false;
  token.set(given.token.trim());
  return true;
}

/** Performs an action, with questions for the token as needed. Returns null on failure or cancel. */
async function perform(name, body) {
  let problem = "";
  for (;;) {
    if ((token.get() === null || problem) && !(await askForToken(problem))) return null;
    try {
      return await post(name, body);
    } catch (error) {
      if (!(error instanceof ApiError)) {
        toast("The daemon does not answer. It is not known whether the action was carried out.", "bad");
        return null;
      }
      if (!error.refused) {
        toast([error.message, error.hint].filter(Boolean).join(" – "), "bad");
        return null;
      }
      token.forget();
      problem = REFUSED;
    }
  }
}

// ---------------------------------------------------------------- actions of a master

const FIRST_USES = 8; // as of the invite that a starting master prints
const FIRST_HOURS = 24;

const joinLine = (invite) => `holdfast join ${invite} -- python train.py`;

/** Returns the command with which the first machines join, with a new invite; null if none was made. */
export async function joinCommand(status) {
  const founder = status.state === "waiting for weights";
  const answer = await perform("invite", { role: "contributor", uses: FIRST_USES, hours: FIRST_HOURS, founder });
  return answer && joinLine(answer.invite);
}

let founding = false; // the run has no weights yet

async function invite() {
  const role = element("select", { name: "role" }, element("option", { value: "contributor", textContent: "contributor (trains)" }), element("option", { value: "spare", textContent: "spare (stands by)" }));
  const uses = element("input", { type: "number", name: "uses", value: "1", min: "1", required: true });
  const hours = element("input", { type: "number", name: "hours", value: "24", min: "0.1", step: "any", required: true });
  const founder = element("input", { type: "checkbox", name: "founder", checked: founding });
  const approve = element("input", { type: "checkbox", name: "approve" });
  const given = await ask(
    "Invite machines",
    [field("Role", role), field("Number of machines", uses), field("Valid for, hours", hours), field("May supply the initial weights (founder)", founder), field("Require approval of each machine", approve)],
    "Create invite",
  );
  if (given === null) return;
  const answer = await perform("invite", {
    role: given.role,
    uses: Number(given.uses),
    hours: Number(given.hours),
    founder: given.founder === "on",
    approve: given.approve === "on",
  });
  if (answer === null) return;
  const line = joinLine(answer.invite);
  const text = element("textarea", { readOnly: true, rows: 5, value: line, "aria-label": "Command for the new machine" });
  tell("Run this on each machine that takes part", text, copyButton(line));
}

export async function kick(member) {
  const reason = element("input", { name: "reason", maxLength: 900, placeholder: "shown to the machine's owner" });
  const given = await ask(
    `Kick ${member.name}?`,
    [
      element("p", { textContent: `${member.name} (${format.short(member.peer)}) is removed permanently. Its certificate is revoked, and its invite does not admit it again.` }),
      field("Reason", reason),
    ],
    "Kick",
    { danger: true },
  );
  if (given === null) return;
  if (await perform("kick", { peer: member.peer, reason: given.reason })) toast(`${member.name} was removed.`);
}

/** Makes a member a spare that takes no place. */
export async function demote(member) {
  if (await perform("demote", { peer: member.peer })) toast(`${member.name} is a spare now; \`holdfast demote --back\` undoes it.`);
}

/** Approves or refuses a pending machine. */
export async function admit(row, refuse) {
  if (!refuse) {
    if (await perform("approve", { peer: row.peer })) toast(`${row.name} was approved.`);
    return;
  }
  const reason = element("input", { name: "reason", maxLength: 900, placeholder: "shown to the machine's owner" });
  const given = await ask(
    `Refuse ${row.name}?`,
    [element("p", { textContent: `${row.name} (${format.short(row.peer)}) is refused permanently: no invite admits its key.` }), field("Reason", reason)],
    "Refuse",
    { danger: true },
  );
  if (given === null) return;
  if (await perform("approve", { peer: row.peer, refuse: true, reason: given.reason })) toast(`${row.name} was refused.`);
}

async function pause() {
  if (await perform("pause", {})) toast("No more rounds open; the one in flight is finished.");
}

async function resume() {
  if (await perform("resume", {})) toast("The run continues.");
}

// ---------------------------------------------------------------- actions of a peer

async function leave() {
  const given = await ask("Leave the run?", [element("p", { textContent: "This machine finishes the round in flight, writes a last checkpoint and leaves. It can rejoin with the same command." })], "Leave", { danger: true });
  if (given && (await perform("leave", {}))) toast("This peer leaves as soon as no other peer needs it.");
}

async function retry() {
  if (await perform("retry", {})) toast("The training command is being restarted.");
}

const BUTTONS = {
  master: [
    ["invite", "Invite…", invite],
    ["pause", "Pause", pause],
    ["resume", "Resume", resume],
  ],
  peer: [
    ["retry", "Restart the trainer", retry],
    ["leave", "Leave…", leave],
  ],
};

/** The bar of buttons for this daemon's actions. */
export class Actions {
  #buttons = new Map();
  #kind = null;

  constructor() {
    const lock = byId("lock");
    const show = () => {
      lock.hidden = token.get() === null;
    };
    lock.addEventListener("click", () => token.forget());
    document.addEventListener("tokenchange", show);
    show();
  }

  show(status) {
    if (this.#kind !== status.kind) this.#make(status.kind);
    byId("actions").hidden = status.state === "finished"; // of a run: nothing is left to do
    founding = status.state === "waiting for weights";
    const paused = status.state === "paused";
    const over = status.state === "finished" || status.state === "superseded" || status.finished === true;
    this.#enable("pause", !paused && !over, paused);
    this.#enable("resume", paused, !paused);
  }

  #make(kind) {
    this.#kind = kind;
    const bar = byId("actions");
    this.#buttons.clear();
    bar.replaceChildren(
      ...BUTTONS[kind].map(([name, text, work]) => {
        const button = element("button", { type: "button", className: name === "invite" ? "main" : "plain", textContent: text });
        button.addEventListener("click", () => this.#run(button, work));
        this.#buttons.set(name, button);
        return button;
      }),
    );
  }

  async #run(button, work) {
    button.disabled = true;
    try {
      await work();
    } finally {
      button.disabled = false;
    }
  }

  #enable(name, able, hidden = false) {
    const button = this.#buttons.get(name);
    if (!button) return;
    button.hidden = hidden;
    button.disabled = !able;
  }
}
