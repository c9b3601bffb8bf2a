"""Chaos, without the chaos: its schedule, its checks, its arithmetic; and light peers, a few."""

from __future__ import annotations

from typing import Any

from benchmarks.chaos_checks import (
    Entry,
    Ledger,
    LiveTime,
    Parity,
    check_journal,
    committed_tokens,
    per_contributor_s,
)
from benchmarks.chaos_schedule import Fault, Kind, counts, schedule
from benchmarks.scale import measure
from holdfast.membership.master.state.journal import (
    JournalRecord,
    RoundCommitted,
    RoundNumbered,
)
from holdfast.protocol.messages import Commit, Contributor, ContributorRun


def drawn(seed: int, *, cuts: bool = True) -> tuple[Fault, ...]:
    return schedule(seed, minutes=600, peers=6, per_hour=120, cuts=cuts)


def test_a_schedule_follows_from_its_seed() -> None:
    faults = drawn(7)
    assert drawn(7) == faults != drawn(8)
    assert 1_000 < len(faults) < 1_400, "ten hours at 120 an hour, give or take"
    kinds = [kind.value for kind in Kind]
    assert list(counts(faults)) == kinds
    assert list(counts(drawn(7, cuts=False))) == [k for k in kinds if not k.startswith("cut")]
    assert [each.at_s for each in faults] == sorted(each.at_s for each in faults)
    for each in faults:
        of_master = each.kind in (Kind.KILL_MASTER, Kind.STOP_MASTER)
        assert (each.target is None) == of_master
        assert each.target is None or each.target != each.other, "nobody is cut off from itself"


def head(version: int, root: str) -> list[dict[str, Any]]:
    return [{"fragment": 0, "version": version, "root": root}]


def test_other_bits_and_older_versions_are_seen() -> None:
    parity = Parity()
    parity.saw("a", 1, head(3, "aa"))
    parity.saw("b", 2, head(3, "aa"))
    parity.saw("a", 1, head(4, "bb"))
    assert not parity.violations
    assert not parity.rolled_back
    parity.saw("b", 2, head(4, "cc"))  # planted: other bits
    parity.saw("a", 1, head(3, "aa"))  # planted: it goes back
    parity.saw("b", 9, head(1, "ee"))  # another process: it lost its memory
    assert parity.violations == ["version 4 of fragment 0 is bb at a and cc at b"]
    assert parity.rolled_back == ["a went back from version 4 of fragment 0 to 3"]


def commit(round_: int, version: int, manifest: tuple[ContributorRun, ...] = ()) -> RoundCommitted:
    both = (Contributor("a" * 32, 100, 1.0), Contributor("b" * 32, 60, 1.0))
    return RoundCommitted(Commit(round_, 1, 0, version, 10, both, bytes(32), manifest))


def ledger(*records: JournalRecord) -> Ledger:
    return check_journal([Entry(record, float(at_s)) for at_s, record in enumerate(records)])


def test_what_a_journal_breaks_is_seen() -> None:
    rounds = [RoundNumbered(number) for number in (1, 2, 3)]
    good = ledger(rounds[0], commit(1, 0), rounds[1], rounds[2], commit(3, 1))
    assert good == Ledger(committed=2, aborted=1, faults=())
    twice = ledger(rounds[0], commit(1, 0), commit(1, 0))
    assert len(twice.faults) == 2, "neither the number nor the version may come twice"
    assert ledger(rounds[0], commit(1, 1)).faults == (
        "round 1 commits on version 1 of fragment 0, which is at 0",
    )
    assert ledger(commit(4, 0)).faults == ("round 4 commits and was never opened",)


def test_what_was_done_is_counted() -> None:
    half = (ContributorRun(b"\x03", 1), ContributorRun(b"\x01", 3))  # b is in one chunk of four
    entries = [Entry(commit(1, 0), 5.0), Entry(commit(2, 1, half), 6.0), Entry(commit(3, 2), 9.0)]
    assert committed_tokens(entries, 5.0, 9.0) == 160 + 100 + 60 / 4
    live = LiveTime()
    for names, at_s in ((["a", "b"], 0.0), (["a", "b"], 1.0), (["a"], 2.0), (["a", "b"], 4.0)):
        live.saw(names, at_s)
    assert live.contributor_s == 2 + 1 + 2, "who is seen at both ends of a while"
    assert per_contributor_s(235.0, live) == 235.0 / 5


def test_light_peers_go_through_whole_rounds() -> None:
    found = measure(6)
    sent = found.round["sent_count"]
    assert sent["Open"] == 6
    assert sent["Packed"] == 12, "an order and its commit"
    assert found.round["cpu_total_s"] > 0
    views = found.one_join["sent_count"]["Packed"]
    assert views >= 7
    assert found.one_join["sent_bytes"]["Packed"] < 120 * views, "only the newcomer needs all of it"
    assert 2.0 < found.commit_s < 3.0
