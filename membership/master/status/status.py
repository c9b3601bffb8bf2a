"""The status of a run, made of what the master's rules know."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import starmap
from typing import TYPE_CHECKING, Any

from ....protocol.messages import Progress
from ....protocol.text import plural
from ...planning.bandwidth import NO_CAP, capped
from ...shared.peer_rows import copy_row, head_row
from ...shared.run_status import (
    DepartedRow,
    EventRow,
    HeldHeadRow,
    MeasuredBandwidth,
    MemberBytes,
    MemberCounts,
    MemberRow,
    PlaceCounts,
    RelayRow,
    RouteRow,
    RunStatus,
)
from ..rounds.round import RoundPhase
from ..state.roster import Member, caps_of, role_of
from ..state.voting_blocs import format_invite_warning, large_invites
from ..trainers import state_of
from .copy_agreement import copy_agreement
from .headline import headline
from .round_rows import past_round_row, round_row
from .why_waiting import WaitReasons, wanted_copies

if TYPE_CHECKING:
    from ..coordinator import Coordinator

_SILENT = Progress(0, 0, 0.0, None, "", 0, 0, 0, {})  # of a member that has not reported any


def describe(coordinator: Coordinator, now_s: float, *, past: bool = True) -> RunStatus:
    """Return the status of the run.

    Args:
      past: with the rounds that are over and the events, which are most of it.
    """
    context = coordinator.context
    history, scheduler = context.history, coordinator.scheduler
    round_table = scheduler.round_table
    reasons = WaitReasons(coordinator, now_s)
    state, why_waiting = reasons.of_run()
    in_progress = len(scheduler.rounds) + coordinator.adoption.undecided_count
    last = next((r for r in reversed(round_table.past) if r.phase is RoundPhase.COMMITTED), None)
    return RunStatus(
        now_s=now_s,
        term=context.term,
        state=state,
        why_waiting=why_waiting,
        headline=headline(coordinator, state),
        step=history.step,
        committed=history.commit_count,
        aborted=max(0, history.schedule.uncommitted_count - in_progress),
        repaired=round_table.repair_count,
        rerun=round_table.rerun_count,
        rounds_wanted=context.spec.run.rounds,
        view=context.roster.view_number,
        counts=MemberCounts(
            live=len(context.roster),
            participating=len(scheduler.contributors()),
            contributed=len(last.contents.added) if last and last.contents else 0,
        ),
        places=PlaceCounts(
            limit=context.spec.membership.contributors,
            taken=len(history.members.places),
            vacant=history.members.vacancies,
        ),
        fragments=tuple(head_row(head) for head in history.heads()),
        copies=copy_agreement(coordinator, now_s),
        members=tuple(
            _member(coordinator, member, reasons, now_s) for member in context.roster.by_number()
        ),
        departed=tuple(
            DepartedRow(
                **_facts(coordinator, member), why=reason, gone_s=now_s - (member.gone_s or now_s)
            )
            for member, reason in context.departed
        ),
        rounds=tuple(round_row(coordinator, round_, now_s) for round_ in scheduler.rounds.values()),
        routes=_routes(coordinator),
        masters=tuple(history.masters.addresses),
        rewound=history.rewinds.count,
        revoked=dict(history.members.revoked),
        audited=scheduler.driver.audits.equal_count,
        warnings=(
            *_rewind_warning(coordinator),
            *starmap(
                format_invite_warning, large_invites(coordinator.places.contributing()).items()
            ),
            *scheduler.same_samples.warnings(),
            *(f"{each.name}: {each.suspicion}" for each in context.roster if each.suspicion),
        ),
        past_rounds=tuple(map(past_round_row, round_table.past)) if past else None,
        events=tuple(
            EventRow(kind=e.kind.value, peer=e.peer, text=e.text, at_s=e.at_s)
            for e in context.events
        )
        if past
        else None,
    )


def _rewind_warning(coordinator: Coordinator) -> Iterator[str]:
    """Yield what the last rewind has cost, until the run is as far again as it was."""
    context = coordinator.context
    history, (before, after) = context.history, context.history.rewinds.last
    if history.commit_count < before:
        lost = before - after
        steps = lost * context.spec.diloco.sync_every // history.fragment_count
        yield (
            f"REWOUND from round {before} to round {after}: {plural(lost, 'round')}, about {steps} "
            "steps of each contributor, are lost; the run trains them again"
        )


def _member(
    coordinator: Coordinator, member: Member, reasons: WaitReasons, now_s: float
) -> MemberRow:
    return MemberRow(
        **_facts(coordinator, member),
        why=reasons.of_member(member),
        attached_s=now_s - member.attached_s,
        silent_s=coordinator.context.detector.silent_s(member.peer, now_s),
    )


def _facts(coordinator: Coordinator, member: Member) -> dict[str, Any]:
    """Return the fields of a member, attached or not."""
    context = coordinator.context
    progress = member.progress or _SILENT
    return {
        "peer": member.peer,
        "name": member.name,
        "number": member.number,
        "addresses": tuple(member.connection.addresses),
        "host": member.connection.host,
        "reach": "reachable" if member.connection.reachable else "outbound",
        "relay": _relay(member),
        "software": member.software,
        "role": role_of(member, context.history.members.places).value,
        "granted": member.grant.role.value,
        "in_sync": member.in_sync,
        "trainer": member.trainer.running,
        "trainer_state": state_of(member, context.now_s),
        "draining": member.draining,
        "phase": progress.phase,
        "step": progress.step,
        "tokens": progress.tokens,
        "tokens_per_s": progress.tokens_per_s,
        "loss": progress.loss,
        "accelerators": progress.accelerators,
        "waited_s": progress.waited_s,
        "stepped_s": progress.stepped_s,
        "metrics": progress.figures,
        "bytes": MemberBytes(
            bulk_sent=progress.bulk_sent_bytes,
            bulk_received=progress.bulk_received_bytes,
            state_received=progress.state_received_bytes,
        ),
        "copies": tuple(map(copy_row, wanted_copies(member))),
        "bandwidth": _bandwidth(coordinator, member),
        "bad_blocks": member.transfers.bad_blocks_count,
        "suspicion": member.suspicion,
        "heads": tuple(
            HeldHeadRow(
                fragment=fragment,
                version=copy.version,
                root=copy.root.hex(),
                state=copy.state.value,
            )
            for fragment, copy in enumerate(member.copies)
        ),
    }


def _relay(member: Member) -> RelayRow | None:
    offer, relayed = member.connection.offer, member.connection.relayed
    if offer is None:
        return None
    return RelayRow(
        bytes_per_s=offer.bytes_per_s,
        quota_bytes=offer.quota_bytes or None,
        pairs=relayed.pairs if relayed else 0,
        streams=relayed.streams if relayed else 0,
        carried_bytes=relayed.carried_bytes if relayed else 0,
        spent=relayed.spent if relayed else False,
    )


def _bandwidth(coordinator: Coordinator, member: Member) -> MeasuredBandwidth:
    context, bandwidths = coordinator.context, coordinator.scheduler.bandwidths
    known = bandwidths.known(member.peer)
    if known:  # whoever sends at a rate counts as able to receive at it, but for this
        known = capped(known, caps_of([member]).get(member.peer, NO_CAP))
    links = bandwidths.links.get(member.peer, {})
    return MeasuredBandwidth(
        up_bytes_per_s=known.up_bytes_per_s if known else None,
        down_bytes_per_s=known.down_bytes_per_s if known else None,
        upload_cap_bytes_per_s=member.connection.upload_bytes_per_s or None,
        download_cap_bytes_per_s=member.connection.download_bytes_per_s or None,
        links={peer: rate for peer, rate in links.items() if peer in context.roster},
    )


def _routes(coordinator: Coordinator) -> tuple[RouteRow, ...]:
    context, routes = coordinator.context, coordinator.routes
    return tuple(
        RouteRow(
            peers=ends,
            names=(context.name(ends[0]), context.name(ends[1])),
            route="none" if pair.route is None else routes.format_kind(pair.route),
            dials=None if pair.route is None else pair.route.dials,
            relay=None if pair.route is None else pair.route.relay or None,
            works=pair.works,
            tried=tuple(pair.tried),
        )
        for ends, pair in routes.arranged()
    )
