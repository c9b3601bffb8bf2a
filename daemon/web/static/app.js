// The page of a daemon: a feed of messages, and a view for each part of the page.
//
//   feed --status--> headline, actions, members, matrix, routes, time line  (a master's)
//        |       \-> peer                                               (a peer's)
//        |-round--> time line     |-point, sample--> charts     |-log--> events
//        \-back---> everything is fetched again, because messages may have been missed
//
// `#member=NAME` shows one member's page in place of the run's (see fragment.js).

import { Actions, admit, demote, kick } from "./actions.js";
import { Pending } from "./decisions.js";
import { byId, mark, onceAFrame, say } from "./dom.js";
import { Events } from "./events.js";
import { Feed } from "./feed.js";
import * as format from "./format.js";
import { isPlace, takeToken, wantedMember } from "./fragment.js";
import { Headline } from "./headline.js";
import { History } from "./history.js";
import { Matrix } from "./matrix.js";
import { MemberPage } from "./member.js";
import { Members } from "./members.js";
import { Outcome, Start } from "./outcome.js";
import { Peer } from "./peer.js";
import { Routes } from "./routes.js";
import { Rounds } from "./rounds.js";

takeToken(); // before anything asks whether there is one
const feed = new Feed();
const actions = new Actions();
let status = null;
let view = null; // made at the first status, which tells the daemon's kind

class MasterView {
  constructor() {
    this.headline = new Headline();
    this.members = new Members(kick);
    this.pending = new Pending(admit);
    this.rounds = new Rounds();
    this.matrix = new Matrix();
    this.routes = new Routes();
    this.events = new Events();
    this.history = new History();
    this.start = new Start();
    this.outcome = new Outcome();
    this.page = null; // of a member
    this.#turn();
    window.addEventListener("hashchange", () => {
      takeToken();
      if (isPlace()) return;
      this.#turn();
      if (status) this.show(status);
      window.scrollTo(0, 0);
      this.page?.load();
    });
  }

  /** Shows the page that the address names: the run's, or a member's. */
  #turn() {
    const wanted = wantedMember();
    this.page?.end();
    this.page = wanted === null ? null : new MemberPage(wanted, { "Demote": demote, "Kick…": kick });
    byId("member").hidden = wanted === null;
    byId("run").hidden = wanted !== null;
    byId("headline").hidden = wanted !== null;
    mark(byId("main"), "data-page", wanted === null ? null : "member");
  }

  show(now) {
    this.page?.show(now);
    this.start.show(now);
    this.outcome.show(now);
    this.headline.show(now);
    this.matrix.show(now);
    this.rounds.show(now);
    this.routes.show(now);
    this.pending.show(now);
    this.members.show(now, this.rounds.lastCommitted);
  }

  async load() {
    // One failure does not stop the others.
    await Promise.allSettled([this.rounds.load(), this.events.load(), this.history.load(), this.page?.load()]);
    performance.mark("holdfast-whole");
  }

  sample(rows) {
    this.history.sample(rows);
    this.page?.sample(rows);
  }

  log(event) {
    this.events.add(event);
    this.history.log(event);
    this.page?.addEvent(event);
  }
}

class PeerView extends Peer {
  constructor() {
    super();
    byId("peer").hidden = false;
  }
}

const show = onceAFrame(() => {
  if (view === null) {
    view = status.kind === "peer" ? new PeerView() : new MasterView();
    view.show(status); // a member's page then knows whose it is
    view.load();
  }
  document.title = `${status.name} · ${status.kind === "peer" ? status.role : status.state} · holdfast`;
  say(byId("name"), status.name);
  actions.show(status);
  view.show(status);
  say(byId("foot"), foot(status));
  if (!performance.getEntriesByName("holdfast-status").length) performance.mark("holdfast-status");
});

function foot(now) {
  const parts = [`holdfast ${now.version ?? ""}`.trim()];
  if (now.kind === "peer") parts.push(`peer ${format.short(now.peer)} of run ${format.short(now.run_id)}`);
  else parts.push(`run ${format.short(now.run_id)}`, `term ${now.term}`, `uptime ${format.duration(now.uptime_s)}`);
  return parts.join(" · ");
}

const CONNECTIONS = {
  connecting: "connecting",
  live: "● live",
  polling: "◐ polling every 2 s",
  away: "○ disconnected",
};

function showConnection() {
  const { connection, since } = feed;
  const node = byId("connection");
  mark(node, "data-connection", connection);
  say(node, CONNECTIONS[connection]);
  const away = byId("away");
  away.hidden = connection !== "away";
  if (away.hidden) return;
  const who = status?.kind === "peer" ? "This peer's daemon" : "The master";
  const then = status === null ? "" : " The figures below are from then.";
  const go = status?.kind === "peer" || status === null ? "" : " Members keep training.";
  say(away, `${who} has not answered since ${format.clock(since)}.${then}${go} This page reconnects by itself.`);
}

feed.addEventListener("status", ({ detail }) => {
  status = detail;
  show();
});
feed.addEventListener("connection", showConnection);
feed.addEventListener("back", () => view?.load());
feed.addEventListener("round", ({ detail }) => view?.rounds?.add?.(detail));
feed.addEventListener("point", ({ detail }) => view?.history?.add(detail));
feed.addEventListener("sample", ({ detail }) => view?.sample(detail));
feed.addEventListener("log", ({ detail }) => view?.log?.(detail));
feed.start();
