"""Figures for Prometheus, made from the status when somebody asks, and of nothing else.

A master tells of the run and of every member as they tell it, a peer of itself. Names follow
Prometheus' habits: seconds and bytes, ``_total`` for what only grows while a daemon lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...membership.master.status.records import MemberRow, PastRoundRow
from ..status_records import MasterStatus, PeerStatus

R = TypeVar("R")
Status = MasterStatus | PeerStatus
Figure = tuple[str, str, Callable[[R], float | bool | None]]

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# name, what it is, where it is in the status; a name that ends in _total is a counter.
RUN: tuple[Figure[MasterStatus], ...] = (
    ("step", "Global step of the run.", lambda s: s.step),
    ("rounds_committed", "Rounds in the present state.", lambda s: s.committed),
    ("rounds_wanted", "Rounds that the run is to have.", lambda s: s.rounds_wanted or None),
    ("rounds_aborted_total", "Rounds that were aborted.", lambda s: s.aborted),
    ("rounds_repaired_total", "Reductions that were repaired.", lambda s: s.repaired),
    ("rounds_rerun_total", "Reductions that were begun again.", lambda s: s.rerun),
    ("rewinds", "Times the run went back to an older state.", lambda s: s.rewound),
    ("term", "Starts of the run's master.", lambda s: s.term),
    ("paused", "Whether the owner has paused the run.", lambda s: s.state == "paused"),
    ("finished", "Whether all rounds are committed.", lambda s: s.state == "finished"),
    ("training", "Whether rounds are opened.", lambda s: s.state == "training"),
    ("members_live", "Members that are attached.", lambda s: s.counts.live),
    (
        "members_participating",
        "Members that could contribute to a round.",
        lambda s: s.counts.participating,
    ),
    (
        "members_contributed",
        "Members whose updates are in the last commit.",
        lambda s: s.counts.contributed,
    ),
    ("places_vacant", "Contributors' places that nobody has.", lambda s: s.places.vacant),
    ("uptime_seconds", "Since this master started.", lambda s: s.uptime_s),
    ("loss", "Mean loss of the contributors.", lambda s: s.headline.loss),
    ("tokens", "Tokens that went into committed rounds.", lambda s: s.headline.tokens),
    (
        "tokens_per_second",
        "Of all contributors.",
        lambda s: s.headline.tokens_per_s,
    ),
    (
        "utilisation_ratio",
        "Of the contributors' time, what went into steps.",
        lambda s: s.headline.utilisation,
    ),
    ("eta_seconds", "Until the last round.", lambda s: s.headline.eta_s),
    ("sent_bytes", "By all peers to each other.", lambda s: s.headline.sent_bytes),
    (
        "saved_bytes",
        "What data parallel training would have sent, less what was sent.",
        lambda s: s.headline.saved_bytes,
    ),
    (
        "round_open_seconds",
        "Of the last round, until it had its set.",
        lambda s: _last(s, lambda last: last.open_s),
    ),
    (
        "round_reduce_seconds",
        "Of the last round's reduction.",
        lambda s: _last(s, lambda last: last.reduce_s),
    ),
)
MEMBER: tuple[Figure[MemberRow], ...] = (
    ("member_step", "Step of its trainer.", lambda m: m.step),
    ("member_in_sync", "Whether it holds the run's state.", lambda m: m.in_sync),
    ("member_contributor", "Whether it has a place.", lambda m: m.role == "contributor"),
    ("member_trainer", "Whether its trainer is attached.", lambda m: m.trainer),
    ("member_loss", "Loss of its trainer.", lambda m: m.loss),
    ("member_tokens_total", "Since its daemon started.", lambda m: m.tokens),
    ("member_tokens_per_second", "Of its trainer.", lambda m: m.tokens_per_s),
    ("member_stepped_seconds_total", "Of its trainer, in steps.", lambda m: m.stepped_s),
    ("member_waited_seconds_total", "Of its trainer, in the hook.", lambda m: m.waited_s),
    ("member_sent_bytes_total", "To other peers.", lambda m: m.bytes.bulk_sent),
    ("member_received_bytes_total", "From other peers.", lambda m: m.bytes.bulk_received),
    (
        "member_uplink_bytes_per_second",
        "As its rounds have measured it.",
        lambda m: m.bandwidth.up_bytes_per_s,
    ),
    (
        "member_downlink_bytes_per_second",
        "As its rounds have measured it.",
        lambda m: m.bandwidth.down_bytes_per_s,
    ),
    ("member_silent_seconds", "Since its last sign of life.", lambda m: m.silent_s),
    ("member_attached_seconds", "Since it attached.", lambda m: m.attached_s),
)
PEER: tuple[Figure[PeerStatus], ...] = (
    ("peer_attached", "Whether the master is there.", lambda s: s.attached),
    ("peer_step", "Step of the trainer.", lambda s: s.step),
    ("peer_in_sync", "Whether it holds the run's state.", lambda s: s.in_sync),
    ("peer_contributor", "Whether it has a place.", lambda s: s.role == "contributor"),
    ("peer_loss", "Loss of the trainer.", lambda s: s.loss),
    ("peer_tokens_total", "Since the daemon started.", lambda s: s.tokens),
    ("peer_tokens_per_second", "Of the trainer.", lambda s: s.tokens_per_s),
    ("peer_stepped_seconds_total", "Of the trainer, in steps.", lambda s: s.stepped_s),
    ("peer_waited_seconds_total", "Of the trainer, in the hook.", lambda s: s.waited_s),
    ("peer_sent_bytes_total", "To other peers.", lambda s: s.bulk_sent_bytes),
    ("peer_received_bytes_total", "From other peers.", lambda s: s.bulk_received_bytes),
    ("peer_state_received_bytes_total", "Blocks of state.", lambda s: s.state_received_bytes),
    ("peer_links", "Peers that it is connected with.", lambda s: len(s.links)),
    ("peer_lanes", "Connections for bulk bytes.", lambda s: sum(i.lanes for i in s.links)),
    ("peer_trainer_restarts_total", "Of its training command.", lambda s: s.trainer_restarts),
    (
        "peer_checkpoint_failing",
        "Whether the last checkpoint could not be written.",
        lambda s: bool(s.checkpoints.error),
    ),
)


def _last(status: MasterStatus, of: Callable[[PastRoundRow], float | None]) -> float | None:
    rounds = [each for each in status.past_rounds or () if each.outcome == "committed"]
    return of(rounds[-1]) if rounds else None


class StatusCollector(Collector):
    """Metrics from a daemon's status."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        run = status.name if isinstance(status, MasterStatus) else status.run_id
        yield _info(status, run)
        if isinstance(status, MasterStatus):
            yield from _families(RUN, [({"run": run}, status)])
            members = [({"run": run, "peer": m.peer, "name": m.name}, m) for m in status.members]
            yield from _families(MEMBER, members)
        else:
            me = {"run": run, "peer": status.peer, "name": status.name}
            yield from _families(PEER, [(me, status)])
            yield from _own_figures(me, status.metrics)


def _info(status: Status, run: str) -> Metric:
    labels = {
        "run": run,
        "run_id": status.run_id,
        "kind": status.kind,
        "version": status.version,
    }
    family = GaugeMetricFamily("holdfast_info", "What this daemon is.", labels=list(labels))
    family.add_metric(list(labels.values()), 1.0)
    return family


def _families(table: Iterable[Figure[R]], of: list[tuple[dict[str, str], R]]) -> Iterator[Metric]:
    for name, about, value_of in table:
        labels = list(of[0][0]) if of else []
        family: CounterMetricFamily | GaugeMetricFamily
        if name.endswith("_total"):
            family = CounterMetricFamily(f"holdfast_{name}", about, labels=labels)
        else:
            family = GaugeMetricFamily(f"holdfast_{name}", about, labels=labels)
        for labelled, status in of:
            value = value_of(status)
            if value is not None:
                family.add_metric(list(labelled.values()), float(value))
        yield family


def _own_figures(me: Mapping[str, str], figures: Mapping[str, float]) -> Iterator[Metric]:
    """What the training script logs by ``run.log``."""
    family = GaugeMetricFamily(
        "holdfast_peer_logged", "Figures of the training script.", labels=[*me, "figure"]
    )
    for name, value in figures.items():
        family.add_metric([*me.values(), name], value)
    yield family


def metrics_route(status: Callable[[], Status]) -> Route:
    """``GET /metrics``: the status' figures, and this process' own."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status))
    ProcessCollector(registry=registry)

    async def metrics(_request: Request) -> Response:
        return Response(generate_latest(registry), headers={"Content-Type": MEDIA_TYPE})

    return Route("/metrics", metrics, methods=["GET"])
