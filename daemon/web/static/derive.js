// Facts derived from a status: a member's place in the round, its lag, its weight.

/** Returns a word for a member's place in the newest round in flight that concerns it. */
export function place(status, member) {
  for (const round of [...status.rounds].reverse()) {
    const word = placeIn(round, member.peer);
    if (word !== null) return word;
  }
  return member.role === "contributor" ? "between rounds" : member.role;
}

function placeIn(round, peer) {
  if (peer in round.lost) return "lost";
  if (peer in round.declined) return "not in round";
  if (round.phase === "open") {
    if (round.ready.includes(peer)) return "ready";
    return round.expected.includes(peer) ? "training" : null;
  }
  if (round.reported.includes(peer)) return "done";
  return round.contributors.some((each) => each.peer === peer) ? "reducing" : null;
}

/** Returns each contributor's share of a round's weight, by peer. */
export function shares(round) {
  const contributors = round?.contributors ?? [];
  const all = contributors.reduce((sum, each) => sum + each.weight, 0);
  return new Map(contributors.map((each) => [each.peer, each.weight_share ?? (all ? each.weight / all : 0)]));
}

/** Returns how far a member's copy and its trainer are behind. */
export function lag(status, member) {
  let versions = 0;
  for (const { fragment, version } of status.fragments) {
    const held = member.heads.find((head) => head.fragment === fragment);
    versions = Math.max(versions, version - (held?.version ?? 0));
  }
  const steps = status.members
    .filter((each) => each.role === "contributor" && each.trainer)
    .map((each) => each.step);
  const behind = member.trainer && steps.length ? Math.max(...steps) - member.step : null;
  return { versions, steps: behind };
}

/** Returns the version of a member's oldest fragment. */
export function version(member) {
  const held = member.heads.map((head) => head.version);
  return held.length ? Math.min(...held) : null;
}

const WINDOW_MS = 20_000;

/** Recent seconds per step of each trainer, without the time in the hook. */
export class StepTimes {
  #seen = new Map(); // peer -> [{ at, step, stepped }], oldest first

  note(member) {
    if (!member.trainer) return;
    const at = Date.now();
    const seen = this.#seen.get(member.peer) ?? [];
    const last = seen.at(-1);
    const backwards = last && (member.step < last.step || member.stepped_s < last.stepped);
    if (backwards) seen.length = 0;
    if (!last || backwards || member.step > last.step) {
      seen.push({ at, step: member.step, stepped: member.stepped_s });
    }
    while (seen.length > 2 && at - seen[0].at > WINDOW_MS) seen.shift();
    this.#seen.set(member.peer, seen);
  }

  /** Returns a member's seconds per step; null before its second report. */
  of(member) {
    const seen = this.#seen.get(member.peer) ?? [];
    if (seen.length < 2) return null;
    const [first, last] = [seen[0], seen.at(-1)];
    return (last.stepped - first.stepped) / (last.step - first.step);
  }
}
