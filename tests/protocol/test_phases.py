"""What may come when: each table has what is really said there, and nothing else."""

from __future__ import annotations

from holdfast.membership.master.coordinator import Coordinator
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol import connection_phases, wire
from holdfast.protocol import messages as said
from holdfast.protocol.connection_phases import ConnectionPhase

TO_THE_DAEMON = {  # what it hears itself
    said.BlocksVerified,
    said.CheckpointTold,
    said.Heartbeat,
    said.LinkBroken,
    said.Renew,
    said.Verified,
}


def test_members_may_say_what_the_master_knows_what_to_do_with() -> None:
    coordinator = Coordinator(RunSpec.parse('[run]\nname = "a"\n'), "ab" * 16, 1)
    assert set(connection_phases.MEMBER.types or ()) == {*coordinator.handlers.table, *TO_THE_DAEMON}


def test_before_somebody_is_known_frames_are_short() -> None:
    for phase in (
        connection_phases.NEWCOMER,
        connection_phases.ADMITTING,
        connection_phases.CLAIM,
        connection_phases.LINK_GREETING,
    ):
        assert phase.frame_bytes_max <= 2**15
        _fits(phase)
    long = [
        each
        for each in connection_phases.GREETING.types or ()
        if wire.LIMITS[each].frame_bytes > 2**17
    ]
    assert long == [said.Hello], "the layout is in it"
    _fits(connection_phases.LINK)


def _fits(phase: ConnectionPhase) -> None:
    """All that may come is short enough to come."""
    assert phase.types
    longest = max(wire.LIMITS[each].frame_bytes for each in phase.types)
    assert longest <= phase.frame_bytes_max
