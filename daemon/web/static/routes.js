// Pairs of members that do not dial each other directly: their route and their relay.

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
    const lines = rows.map((row) => describe(row, names));
    const now = lines.join("\n");
    if (now === this.#shown) return;
    this.#shown = now;
    this.box.hidden = lines.length === 0;
    const more = lines.length - SHOWN_MAX;
    this.box.replaceChildren(
      element("h3", { textContent: "Assisted links" }),
      element("ul", {}, ...lines.slice(0, SHOWN_MAX).map((textContent) => element("li", { textContent }))),
      ...(more > 0 ? [element("p", { className: "muted", textContent: `and ${more} more pairs` })] : []),
    );
  }
}

function describe(row, names) {
  const by = row.relay ? ` by ${names.get(row.relay) ?? "a former member"}` : "";
  const pair = row.names.join(" and ");
  if (row.works) return `${pair}: ${row.route}${by}`;
  const last = row.tried.at(-1);
  return `${pair}: no link; trying: ${row.route}${by}${last ? ` (${last})` : ""}`;
}
