// The key figures, and a sentence about what the run does or waits for.

import { byId, element, mark, say } from "./dom.js";
import * as format from "./format.js";

const MARKS = {
  training: "●",
  paused: "❚❚",
  finished: "✓",
  superseded: "✕",
};

/** A list of figures, each with a name, a value and a remark. */
export class Figures {
  #cells = new Map();

  constructor(list, names) {
    list.replaceChildren(
      ...names.map((name) => {
        const value = element("dd", { textContent: format.UNKNOWN });
        const remark = element("dd", { className: "remark" });
        this.#cells.set(name, { value, remark });
        return element("div", { className: "figure" }, element("dt", { textContent: name }), value, remark);
      }),
    );
  }

  set(name, value, remark = "") {
    const cell = this.#cells.get(name);
    say(cell.value, value);
    cell.value.classList.toggle("word", /^[a-z]/.test(value));
    say(cell.remark, remark);
  }

  /** Shows a progress bar below the value; hides it if `part` is null. */
  bar(name, part) {
    const { remark } = this.#cells.get(name);
    let bar = remark.previousElementSibling;
    if (bar.tagName !== "PROGRESS") {
      bar = element("progress", { max: 1, "aria-label": name });
      remark.before(bar);
    }
    bar.hidden = part === null;
    if (part !== null) bar.value = part;
  }
}

/** Shows the state as a pill; `kind` sets its colour. */
export function showState(word, kind = word.startsWith("waiting") ? "waiting" : word) {
  const state = byId("state");
  mark(state, "data-state", kind);
  say(state, `${MARKS[kind] ?? "◐"} ${word}`);
}

/** Shows a sentence, highlighted if `waits`. The line is never hidden, so that nothing below moves. */
export function showWhy(sentence, waits) {
  const why = byId("why");
  why.hidden = false;
  mark(why, "data-tone", waits ? "wait" : "calm");
  say(why, sentence[0].toUpperCase() + sentence.slice(1));
}

/** Returns whether a sentence is about a rewind: work that is lost. */
export const isLoss = (text) => text.startsWith("REWOUND");

/** Shows faults that the operator should look at, though nothing waits for them. */
function showWarnings(warnings) {
  const place = byId("warnings");
  place.hidden = !warnings.length;
  if (place.dataset.shown === (place.dataset.shown = JSON.stringify(warnings))) return; // an alert is read out when it changes
  place.replaceChildren(...warnings.map((text) => element("p", { className: "notice", "data-tone": isLoss(text) ? "bad" : "wait", textContent: text })));
}

export class Headline {
  #figures = new Figures(byId("figures"), [
    "Loss",
    "Tokens",
    "Tokens/s",
    "Utilisation",
    "Rounds",
    "Time left",
    "Sent",
    "Saved",
  ]);

  show(status) {
    const { headline, counts } = status;
    const figures = this.#figures;
    showState(status.state);
    showWhy(whyOf(status), waits(status));
    showWarnings(status.warnings ?? []);
    byId("outer-text").textContent = headline.outer_text;
    const { ending } = status;
    figures.set("Loss", format.loss(headline.loss ?? ending?.loss_end), `step ${format.count(headline.step)}`);
    figures.set("Tokens", format.large(headline.tokens), progress(headline));
    if (ending) figures.set("Tokens/s", format.large(ending.duration_s ? headline.tokens / ending.duration_s : null), "over the whole run");
    else figures.set("Tokens/s", format.large(waits(status) ? null : headline.tokens_per_s), format.counted(counts.participating, "contributor"));
    figures.set("Utilisation", format.percent(headline.utilisation), "of contributors' time");
    const wanted = headline.rounds_wanted;
    figures.set(
      "Rounds",
      format.count(headline.rounds),
      [wanted ? `of ${format.count(wanted)}` : "", status.aborted ? `${format.count(status.aborted)} aborted` : ""].filter(Boolean).join(", "),
    );
    figures.bar("Rounds", wanted ? headline.rounds / wanted : null);
    figures.set("Time left", left(status), ending ? "finished" : waits(status) ? status.state : wanted ? ends(headline.eta_s) : "no limit on rounds");
    figures.set("Sent", format.bytes(headline.sent_bytes), "between members");
    figures.set("Saved", format.bytes(headline.saved_bytes), times(headline));
  }
}

const waits = ({ state }) => !["training", "finished"].includes(state);

function left(status) {
  if (status.state === "finished") return "none";
  return format.duration(status.headline.eta_s);
}

function ends(seconds) {
  if (!seconds) return "";
  return `until about ${format.clock(Date.now() / 1000 + seconds).replace(/:\d\d$/, "")}`;
}

/** Compares the bytes sent with those of data parallel training. */
function times({ sent_bytes: sent, saved_bytes: saved }) {
  if (!sent || saved === null || saved <= 0) return "of data parallel";
  return `data parallel: ${format.large((sent + saved) / sent)} × as much`;
}

/** Tells what the run waits for, or what it does. */
function whyOf(status) {
  if (status.why_waiting) return status.why_waiting;
  if (status.state === "finished") return "finished: all rounds are committed";
  const [round] = status.rounds;
  if (round?.phase === "open") return "training until the next round";
  if (round) return "averaging";
  return "training; the next round opens when it is due";
}

function progress(headline) {
  if ((headline.epoch ?? null) === null) return "in committed rounds";
  return `epoch ${format.count(headline.epoch)}, ${format.percent(headline.epoch_share)} done`;
}
