// The page of a peer: what this machine does in the run, and what it waits for.

import { byId, element, mark, say, toast } from "./dom.js";
import * as format from "./format.js";
import { Figures, showState, showWhy } from "./headline.js";
import { MemberCharts } from "./member_charts.js";
import { exportLine } from "./outcome.js";

export class Peer {
  #over = "";

  constructor() {
    this.figures = new Figures(byId("figures"), ["Loss", "Tokens", "Tokens/s", "Utilisation", "Role", "Sent", "Received", "Trainer"]);
    this.notices = element("ul", { className: "notices" });
    this.copies = element("div", {});
    this.links = element("tbody");
    this.congestion = element("p", {});
    this.congestionFix = element("p", {});
    this.heads = element("tbody");
    this.rounds = element("p", {});
    this.limits = element("p", {});
    this.checkpoint = element("p", {});
    this.charts = new MemberCharts(() => ({}));
    byId("peer").replaceChildren(
      this.notices,
      card("Copying the state", this.copies, "copies"),
      this.charts.box,
      element(
        "div",
        { className: "pair" },
        card("Links", element("div", {}, table(["Peer", "Connections", "Round trip", "Congestion control", "Sent", "Retransmitted"], this.links), this.congestion, this.congestionFix), "links"),
        card("Local state", element("div", {}, this.rounds, this.checkpoint, this.limits, table(["Fragment", "Version", "Digest"], this.heads)), "holds"),
      ),
    );
  }

  async load() {
    try {
      await this.charts.load();
    } catch (error) {
      toast(`Loading the charts failed: ${error.message}`, "bad");
    }
  }

  sample(rows) {
    rows.forEach((row) => this.charts.add(row));
  }

  show(status) {
    showState(...stateOf(status));
    const why = status.why || (waitsForGpus(status) ? `the trainer ${status.trainer_state}` : "");
    showWhy(why || [doing(status), status.left_s && `${format.duration(status.left_s)} left`].filter(Boolean).join("; "), Boolean(why));
    this.#showFigures(status);
    this.notices.replaceChildren(...status.notices.map((text) => element("li", { textContent: text })));
    this.notices.hidden = status.notices.length === 0;
    this.#showCopies(status.copies);
    this.#showLinks(status);
    this.heads.replaceChildren(...status.heads.map((head) => row([head.fragment, head.version, head.root.slice(0, 16)])));
    const rounds = status.rounds.map((round) => `#${round.round}: ${round.phase}${round.attempt > 1 ? `, attempt ${round.attempt}` : ""}`);
    say(this.rounds, rounds.length ? `Rounds in flight: ${rounds.join("; ")}.` : "No round is in flight.");
    say(this.checkpoint, checkpointText(status.checkpoints));
    mark(this.checkpoint, "class", status.checkpoints.error ? "problem" : "");
    const limits = Object.entries(status.limits).map(([name, value]) => `${name.replaceAll("_", "-")} ${value}`);
    this.limits.hidden = limits.length === 0;
    say(this.limits, `Limits of this machine: ${limits.join(", ")}.`);
    this.#showEnd(status);
  }

  /** Tells where the final weights are, once the run is finished. */
  #showEnd(status) {
    const { place, newest } = status.checkpoints;
    const box = byId("ending");
    box.hidden = !status.finished;
    const now = JSON.stringify([status.finished, place, newest]);
    if (box.hidden || now === this.#over) return;
    this.#over = now;
    box.replaceChildren(
      element("h2", { textContent: "The run is finished" }),
      element("p", { textContent: newest ? `The final weights are in the checkpoints in ${place}. For a file of them:` : `This peer writes the final weights to ${place} when it leaves. Then, for a file of them:` }),
      exportLine(`holdfast export --checkpoints ${quoted(place)} model.safetensors`),
    );
  }

  #showFigures(status) {
    const { figures } = this;
    const all = status.stepped_s + status.waited_s;
    figures.set("Loss", format.loss(status.loss), `step ${format.count(status.step)}`);
    figures.set("Tokens", format.large(status.tokens), "since the start");
    figures.set("Tokens/s", format.large(status.tokens_per_s), status.accelerators);
    figures.set("Utilisation", format.percent(all ? status.stepped_s / all : null), "of the trainer's time");
    figures.set("Role", status.role, [status.in_sync ? "in sync" : "not in sync", status.mapped_port && `router's port: ${status.mapped_port}`].filter(Boolean).join("; "));
    const again = retransmitted(status.bulk_sent_bytes, status.bulk_retransmitted_bytes);
    figures.set("Sent", format.bytes(status.bulk_sent_bytes), again === format.UNKNOWN ? "" : `${again} retransmitted`);
    figures.set("Received", format.bytes(status.bulk_received_bytes), status.state_received_bytes ? `${format.bytes(status.state_received_bytes)} of them state` : "");
    const [word, more] = apart(status.trainer_state);
    figures.set("Trainer", word, [more, restarts(status.trainer_restarts)].filter(Boolean).join(", "));
  }

  #showLinks(status) {
    const names = new Map(status.members.map(({ peer, name }) => [peer, name]));
    const cells = (link) => [
      names.get(link.peer) ?? format.short(link.peer),
      link.lanes,
      format.duration(link.round_trip_s),
      link.congestion.filter(Boolean).join(", ") || format.UNKNOWN,
      format.bytes(link.sent_bytes),
      retransmitted(link.sent_bytes, link.retransmitted_bytes),
    ];
    this.links.replaceChildren(...status.links.map((link) => row(cells(link))));
    const { text, fix } = status.congestion ?? {};
    this.congestion.hidden = this.congestionFix.hidden = !fix;
    say(this.congestion, `Congestion control: ${text}.`);
    say(this.congestionFix, `Fix: ${fix}.`);
  }

  #showCopies(copies) {
    byId("copies").hidden = copies.length === 0;
    this.copies.replaceChildren(
      ...copies.map((copy) =>
        element(
          "p",
          {},
          element("progress", { max: Math.max(1, copy.bytes.all), value: copy.bytes.done, "aria-label": `Fragment ${copy.fragment}` }),
          ` ${copy.text}`,
        ),
      ),
    );
  }
}

/** Returns a word for the peer's state, and its kind. */
function stateOf(status) {
  if (status.finished) return ["finished"];
  if (status.phase !== "in the run") return [status.phase, "waiting"];
  if (!status.in_sync) return ["not in sync", "waiting"];
  if (waitsForGpus(status)) return ["waiting for GPUs", "waiting"];
  return [status.role === "contributor" ? "training" : status.role];
}

const waitsForGpus = (status) => !status.finished && status.trainer_state.startsWith("waits:");

/** Returns the words before the first colon or bracket, and what follows them. */
function apart(text) {
  const at = text.search(/:|\(/);
  return at < 0 ? [text, ""] : [text.slice(0, at).trim(), text.slice(at).replace(/^: */, "")];
}

function doing(status) {
  if (status.finished) return "the run is finished";
  if (status.rounds.length) return "taking part in a round";
  return status.role === "contributor" ? "training until the next round" : `following the run as a ${status.role}`;
}

function checkpointText(saved) {
  if (saved.error) return `No checkpoint: ${saved.error}`;
  if (saved.writing) return `A checkpoint is being written to ${saved.place}.`;
  return saved.newest ? `Newest checkpoint: step ${format.count(saved.step)}, in ${saved.place}.` : "No checkpoint was written yet.";
}

/** Formats the share of all sent bytes that TCP sent again. */
const retransmitted = (sent, again) => format.percent(again === null ? null : again / Math.max(1, sent + again));

const restarts = (count) => (count ? `restarted ${count} time${count === 1 ? "" : "s"}` : "");

const row = (cells) => element("tr", {}, ...cells.map((text) => element("td", { textContent: String(text) })));

const table = (headings, body) =>
  element("div", { className: "wide" }, element("table", {}, element("thead", {}, element("tr", {}, ...headings.map((text) => element("th", { scope: "col", textContent: text })))), body));

const card = (title, content, id) =>
  element("section", { className: "card", id, "aria-labelledby": `${id}-title` }, element("div", { className: "title" }, element("h2", { id: `${id}-title`, textContent: title })), content);

/** Quotes a path for a shell if it needs that. */
const quoted = (path) => (/^[\w./:@-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\\''")}'`);
