// The page of a daemon: one feed in, one view per part of the page out.
//
//   feed --status--> headline, actions, members, matrix, routes, time line  (a master's)
//        |       \-> peer                                               (a peer's)
//        |-round--> time line     |-point--> charts     |-log--> events
//        \-back---> what was fetched is fetched again: something may have been missed

import { Actions, admit, clear, kick } from "./actions.js";
import { Pending, Quarantine } from "./decisions.js";
import { byId, mark, onceAFrame, say } from "./dom.js";
import { Events } from "./events.js";
import { Feed } from "./feed.js";
import * as format from "./format.js";
import { Headline } from "./headline.js";
import { History } from "./history.js";
import { Matrix } from "./matrix.js";
import { Members } from "./members.js";
import { Peer } from "./peer.js";
import { Routes } from "./routes.js";
import { Rounds } from "./rounds.js";

const feed = new Feed();
const actions = new Actions();
let status = null;
let view = null; // made by the first status: it says whose page this is

class MasterView {
  constructor() {
    this.headline = new Headline();
    this.members = new Members(kick);
    this.pending = new Pending(admit);
    this.quarantine = new Quarantine(clear);
    this.rounds = new Rounds();
    this.matrix = new Matrix();
    this.routes = new Routes();
    this.events = new Events();
    this.history = new History();
    byId("run").hidden = false;
  }

  show(now) {
    this.headline.show(now);
    this.matrix.show(now);
    this.rounds.show(now);
    this.routes.show(now);
    this.pending.show(now);
    this.quarantine.show(now);
    this.members.show(now, this.rounds.lastCommitted);
  }

  async load() {
    // Each by itself: one that fails leaves the others.
    await Promise.allSettled([this.rounds.load(), this.events.load(), this.history.load()]);
    performance.mark("holdfast-whole");
  }
}

class PeerView extends Peer {
  constructor() {
    super();
    byId("peer").hidden = false;
  }

  async load() {
    // all that it shows is in its status
  }
}

const show = onceAFrame(() => {
  if (view === null) {
    view = status.kind === "peer" ? new PeerView() : new MasterView();
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
  const said = [`holdfast ${now.version ?? ""}`.trim()];
  if (now.kind === "peer") said.push(`peer ${format.short(now.peer)} of run ${format.short(now.run_id)}`);
  else said.push(`run ${format.short(now.run_id)}`, `term ${now.term}`, `up for ${format.duration(now.uptime_s)}`);
  return said.join(" · ");
}

const CONNECTIONS = {
  connecting: "connecting",
  live: "● live",
  polling: "◐ asking every 2 s",
  away: "○ no answer",
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
  const then = status === null ? "" : " What is shown is from then.";
  const go = status?.kind === "peer" || status === null ? "" : " Members go on training meanwhile.";
  say(away, `${who} does not answer since ${format.clock(since)}.${then}${go} This page goes on by itself when it is back.`);
}

feed.addEventListener("status", ({ detail }) => {
  status = detail;
  show();
});
feed.addEventListener("connection", showConnection);
feed.addEventListener("back", () => view?.load());
feed.addEventListener("round", ({ detail }) => view?.rounds?.add?.(detail));
feed.addEventListener("point", ({ detail }) => view?.history?.add(detail));
feed.addEventListener("log", ({ detail }) => view?.events?.add(detail));
feed.start();
