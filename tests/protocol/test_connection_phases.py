"""Connection phases: each table has the messages that are really sent there, and no others."""

from __future__ import annotations

from holdfast.membership.master.coordinator import Coordinator
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol import connection_phases, messages, wire
from holdfast.protocol.connection_phases import ConnectionPhase

TO_THE_DAEMON = {  # what it hears itself
    messages.Heartbeat,
    messages.LinkBroken,
    messages.Renew,
}


def test_members_may_send_every_message_that_the_master_handles() -> None:
    coordinator = Coordinator(RunSpec.parse('[run]\nname = "a"\n'), "ab" * 16, 1)
    assert set(connection_phases.MEMBER.types or ()) == {
        *coordinator.handlers.table,
        *TO_THE_DAEMON,
    }


def test_peers_may_send_each_other_what_links_take() -> None:
    taken: set[type[messages.Message]] = {
        messages.Heartbeat,
        messages.LanesReceived,
        messages.LanesWanted,
        messages.IndexRequest,
        messages.Index,
        messages.BlocksRequest,
        messages.BlocksRefused,
    }
    assert set(connection_phases.LINK.types or ()) == taken


def test_frames_are_short_before_the_sender_is_identified() -> None:
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
    assert long == [messages.Hello], "the layout is in it"
    _fits(connection_phases.LINK)


def _fits(phase: ConnectionPhase) -> None:
    """Check that every type of a phase fits the phase's limit."""
    assert phase.types
    longest = max(wire.LIMITS[each].frame_bytes for each in phase.types)
    assert longest <= phase.frame_bytes_max
