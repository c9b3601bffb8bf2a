"""Chaos, without the chaos: its schedule, its checks, its arithmetic; and light peers, a few."""

from __future__ import annotations

import pytest

from tests import needs
from tests.lab.telling import told

SCHEDULE = """
from attrs import asdict
from benchmarks.chaos_schedule import Kind, counts, schedule
def drawn(seed, cuts=True):
    return schedule(seed, minutes=600, peers=6, per_hour=120, cuts=cuts)
faults = drawn(7)
targets = [(f.target, f.other) for f in faults]
print(json.dumps({
    "same": drawn(7) == faults, "other": drawn(8) == faults, "count": len(faults),
    "kinds": sorted(counts(faults)), "all": sorted(k.value for k in Kind),
    "without": sorted(counts(drawn(7, cuts=False))),
    "ordered": [f.at_s for f in faults] == sorted(f.at_s for f in faults),
    "itself": sum(a == b for a, b in targets if a is not None),
    "masters": all((f.target is None) == ("master" in f.kind.value and "cut" not in f.kind.value)
                   for f in faults)}))
"""


def test_a_schedule_follows_from_its_seed() -> None:
    found = told(SCHEDULE)

    assert found["same"]
    assert not found["other"]
    assert 1_000 < found["count"] < 1_400, "ten hours at 120 an hour, give or take"
    assert found["kinds"] == found["all"]
    assert found["without"] == [kind for kind in found["all"] if not kind.startswith("cut")]
    assert found["ordered"]
    assert found["itself"] == 0, "nobody is cut off from itself"
    assert found["masters"]


CHECKS = """
from benchmarks.chaos_checks import *
from holdfast.membership.master.state.journal import RoundCommitted, RoundNumbered
from holdfast.protocol.messages import Commit, Contributor, ContributorRun
def head(version, root): return [{"fragment": 0, "version": version, "root": root}]
parity = Parity()
parity.saw("a", 1, head(3, "aa"))
parity.saw("b", 2, head(3, "aa"))
parity.saw("a", 1, head(4, "bb"))
calm = (list(parity.violations), list(parity.rolled_back))
parity.saw("b", 2, head(4, "cc"))  # planted: other bits
parity.saw("a", 1, head(3, "aa"))  # planted: it goes back
parity.saw("b", 9, head(1, "ee"))  # another process: it lost its memory
def commit(round, version, manifest=()):
    both = (Contributor("a" * 32, 100, 1.0), Contributor("b" * 32, 60, 1.0))
    return RoundCommitted(Commit(round, 1, 0, version, 10, both, bytes(32), manifest))
def ledger(*records): return check_journal([Entry(r, float(at)) for at, r in enumerate(records)])
good = ledger(RoundNumbered(1), commit(1, 0), RoundNumbered(2), RoundNumbered(3), commit(3, 1))
half = (ContributorRun(b"\\x03", 1), ContributorRun(b"\\x01", 3))  # b is in one chunk of four
entries = [Entry(commit(1, 0), 5.0), Entry(commit(2, 1, half), 6.0), Entry(commit(3, 2), 9.0)]
live = LiveTime()
for names, at_s in ((["a", "b"], 0.0), (["a", "b"], 1.0), (["a"], 2.0), (["a", "b"], 4.0)):
    live.saw(names, at_s)
print(json.dumps({
    "calm": calm, "violations": parity.violations, "rolled_back": parity.rolled_back,
    "good": [good.committed, good.aborted, list(good.faults)],
    "twice": ledger(RoundNumbered(1), commit(1, 0), commit(1, 0)).faults,
    "skipped": ledger(RoundNumbered(1), commit(1, 1)).faults,
    "unknown": ledger(commit(4, 0)).faults,
    "tokens": committed_tokens(entries, 5.0, 9.0),
    "live_s": live.contributor_s, "worth": per_contributor_s(235.0, live)}))
"""


def test_what_is_broken_is_seen_and_what_was_done_is_counted() -> None:
    found = told(CHECKS)

    assert found["calm"] == [[], []]
    assert found["violations"] == ["version 4 of fragment 0 is bb at a and cc at b"]
    assert found["rolled_back"] == ["a went back from version 4 of fragment 0 to 3"]
    assert found["good"] == [2, 1, []]
    assert len(found["twice"]) == 2, "neither the number nor the version may come twice"
    assert found["skipped"] == ["round 1 commits on version 1 of fragment 0, which is at 0"]
    assert found["unknown"] == ["round 4 commits and was never opened"]
    assert found["tokens"] == 160 + 100 + 60 / 4
    assert found["live_s"] == 2 + 1 + 2, "who is seen at both ends of a while"
    assert found["worth"] == 235.0 / 5


SCALE = """
from benchmarks.scale import ROUNDS, measure
found = measure(6)
print(json.dumps({"sent": found.round["sent_count"], "cpu_s": found.round["cpu_total_s"],
                  "view": found.one_join["sent_count"], "commit_s": found.commit_s}))
"""


def test_light_peers_go_through_whole_rounds() -> None:
    found = told(SCALE)

    assert (
        found["sent"]["Open"] == found["sent"]["BriefReduce"] == found["sent"]["BriefCommit"] == 6
    )
    assert found["cpu_s"] > 0
    assert found["view"]["ViewChange"] >= 6
    assert found["view"]["View"] == 1, "only the newcomer needs all of it"
    assert 2.0 < found["commit_s"] < 3.0


CUT = """
import socket, subprocess, sys
from benchmarks.grounds import Switch
SERVE = "import socket; s = socket.create_server(('0.0.0.0', 9000)); print(flush=True)"
SERVE += "; s.accept(); s.accept()"
def reaches(lab):
    with lab.inside(0), socket.socket() as s:
        s.settimeout(1.5)
        return s.connect_ex((lab.address(1), 9000)) == 0
with Switch(2) as lab:
    server = lab.popen(1, [sys.executable, "-c", SERVE], stdout=subprocess.PIPE)
    server.stdout.readline()
    before = reaches(lab)
    lab.cut(1, 0)  # its answers
    cut = reaches(lab)
    lab.heal(1, 0)
    print(json.dumps([before, cut, reaches(lab)]))
"""


@pytest.mark.nightly
def test_a_host_can_be_cut_off_and_healed() -> None:
    needs.need(needs.switch())
    assert told(CUT) == [True, False, True]
