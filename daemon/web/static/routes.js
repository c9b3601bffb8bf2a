// Pairs of members that do not simply dial each other: which route they have, and who forwards.

import { byId, element } from "./dom.js";

const SHOWN_MAX = 12;

export class Routes {
  #shown = "";

  constructor() {
    this.box = byId("routes");
  }

  show(status) {
    const names = new Map(status.members.map(({ peer, name }) => [peer, name]));
    const rows = [...status.routes].sort((a, b) => Number(a.works) - Number(b.works));
    const said = rows.map((row) => told(row, names));
    const now = said.join("\n");
    if (now === this.#shown) return;
    this.#shown = now;
    this.box.hidden = said.length === 0;
    const more = said.length - SHOWN_MAX;
    this.box.replaceChildren(
      element("h3", { textContent: "Arranged links" }),
      element("ul", {}, ...said.slice(0, SHOWN_MAX).map((textContent) => element("li", { textContent }))),
      ...(more > 0 ? [element("p", { className: "muted", textContent: `and ${more} more pairs` })] : []),
    );
  }
}

function told(row, names) {
  const by = row.relay ? ` by ${names.get(row.relay) ?? "one that is gone"}` : "";
  const pair = row.names.join(" and ");
  if (row.works) return `${pair}: ${row.route}${by}`;
  const last = row.tried.at(-1);
  return `${pair}: no link; tried now: ${row.route}${by}${last ? ` (${last})` : ""}`;
}
