// What the address bar says after `#`: the member whose page is shown, and a token to sign in with.

import { token } from "./api.js";

const read = () => new URLSearchParams(location.hash.slice(1));

/** Stores a token of the address (`#token=...`) for this tab, and removes it from the address bar. */
export function takeToken() {
  const parts = read();
  const given = parts.get("token");
  if (given === null) return;
  parts.delete("token");
  const rest = parts.toString();
  history.replaceState(null, "", `${location.pathname}${location.search}${rest && `#${rest}`}`);
  if (given) token.set(given);
}

/** Returns the name or id of the member whose page is wanted; null: the run's page. */
export const wantedMember = () => read().get("member") || null;

/** Returns whether the address only leads to a place in the page, such as that of the skip link. */
export const isPlace = () => location.hash === "#main";
