"""Metrics for Prometheus, made from the status at each request.

A master exports the run and all members as they report themselves, a peer exports itself. Names
follow Prometheus' conventions: seconds and bytes, ``_total`` for counters.
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

from ...membership.shared.run_status import MemberRow, PastRoundRow
from ..status_records import LinkRow, MasterStatus, PeerStatus

R = TypeVar("R")
Status = MasterStatus | PeerStatus
Figure = tuple[str, str, Callable[[R], float | bool | None]]

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LEADS = "1 at the master that leads the run, 0 at one that waits."

# Name, help, value in the status. A name that ends in _total is a counter.
RUN: tuple[Figure[MasterStatus], ...] = (
    ("step", "Global step of the run.", lambda s: s.step),
    ("rounds_committed", "Rounds committed in the current state.", lambda s: s.committed),
    ("rounds_wanted", "Rounds after which the run is finished.", lambda s: s.rounds_wanted or None),
    ("rounds_aborted_total", "Rounds that were aborted.", lambda s: s.aborted),
    ("rounds_repaired_total", "Reductions that were repaired.", lambda s: s.repaired),
    ("rounds_rerun_total", "Reductions that were started again.", lambda s: s.rerun),
    ("rewinds", "Times the run went back to an older state.", lambda s: s.rewound),
    ("term", "Starts of the run's master.", lambda s: s.term),
    ("leads", LEADS, lambda _: True),
    ("paused", "1 if the operator has paused the run.", lambda s: s.state == "paused"),
    ("finished", "1 if all rounds are committed.", lambda s: s.state == "finished"),
    ("training", "1 if rounds are opened.", lambda s: s.state == "training"),
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
    ("places_vacant", "Vacant places of contributors.", lambda s: s.places.vacant),
    ("uptime_seconds", "Seconds since this master started.", lambda s: s.uptime_s),
    ("loss", "Mean loss of the contributors.", lambda s: s.headline.loss),
    ("tokens", "Tokens trained in committed rounds.", lambda s: s.headline.tokens),
    (
        "tokens_per_second",
        "Tokens per second of all contributors.",
        lambda s: s.headline.tokens_per_s,
    ),
    (
        "utilisation_ratio",
        "Share of the contributors' time spent in training steps.",
        lambda s: s.headline.utilisation,
    ),
    ("eta_seconds", "Estimated seconds until the last round.", lambda s: s.headline.eta_s),
    (
        "sent_bytes",
        "Bytes that all peers have sent to each other.",
        lambda s: s.headline.sent_bytes,
    ),
    (
        "saved_bytes",
        "Bytes that data parallel training would have sent, minus the bytes sent.",
        lambda s: s.headline.saved_bytes,
    ),
    ("epoch", "First epoch of leased data that is not complete.", lambda s: s.headline.epoch),
    (
        "epoch_done_ratio",
        "Share of that epoch that is in committed rounds.",
        lambda s: s.headline.epoch_share,
    ),
    (
        "outer_gain",
        "How far an outer step goes along its gradient, in outer rates.",
        lambda s: s.headline.outer_gain,
    ),
    (
        "outer_cosine",
        "Cosine between the mean gradient and the outer momentum.",
        lambda s: s.headline.outer_cosine,
    ),
    (
        "round_open_seconds",
        "Seconds in which the last round was open.",
        lambda s: _last(s, lambda last: last.open_s),
    ),
    (
        "round_reduce_seconds",
        "Seconds of the last round's reduction.",
        lambda s: _last(s, lambda last: last.reduce_s),
    ),
)
MEMBER: tuple[Figure[MemberRow], ...] = (
    ("member_step", "Step of the member's trainer.", lambda m: m.step),
    ("member_in_sync", "1 if the member holds the run's state.", lambda m: m.in_sync),
    ("member_contributor", "1 if the member is a contributor.", lambda m: m.role == "contributor"),
    ("member_trainer", "1 if the member's trainer is attached.", lambda m: m.trainer),
    ("member_loss", "Loss of the member's trainer.", lambda m: m.loss),
    ("member_tokens_total", "Tokens trained since the daemon started.", lambda m: m.tokens),
    ("member_tokens_per_second", "Tokens per second.", lambda m: m.tokens_per_s),
    ("member_stepped_seconds_total", "Trainer's time in training steps.", lambda m: m.stepped_s),
    ("member_waited_seconds_total", "Trainer's time in the hook.", lambda m: m.waited_s),
    ("member_sent_bytes_total", "Bytes sent to other peers.", lambda m: m.bytes.bulk_sent),
    ("member_received_bytes_total", "Bytes received from peers.", lambda m: m.bytes.bulk_received),
    (
        "member_uplink_bytes_per_second",
        "Upload rate measured in rounds.",
        lambda m: m.bandwidth.up_bytes_per_s,
    ),
    (
        "member_downlink_bytes_per_second",
        "Download rate measured in rounds.",
        lambda m: m.bandwidth.down_bytes_per_s,
    ),
    ("member_silent_seconds", "Seconds since its last message.", lambda m: m.silent_s),
    ("member_attached_seconds", "Seconds since the member attached.", lambda m: m.attached_s),
)
PEER: tuple[Figure[PeerStatus], ...] = (
    ("peer_attached", "1 if the peer is connected to the master.", lambda s: s.attached),
    ("peer_step", "Step of the trainer.", lambda s: s.step),
    ("peer_in_sync", "1 if the peer holds the run's state.", lambda s: s.in_sync),
    ("peer_contributor", "1 if the peer is a contributor.", lambda s: s.role == "contributor"),
    ("peer_loss", "Loss of the trainer.", lambda s: s.loss),
    ("peer_tokens_total", "Tokens trained since the start.", lambda s: s.tokens),
    ("peer_tokens_per_second", "Tokens per second.", lambda s: s.tokens_per_s),
    ("peer_stepped_seconds_total", "Time in training steps.", lambda s: s.stepped_s),
    ("peer_waited_seconds_total", "Time in the hook.", lambda s: s.waited_s),
    ("peer_sent_bytes_total", "Bytes sent to peers.", lambda s: s.bulk_sent_bytes),
    (
        "peer_retransmitted_bytes_total",
        "Bytes to peers that TCP sent again.",
        lambda s: s.bulk_retransmitted_bytes,
    ),
    ("peer_received_bytes_total", "Bytes received.", lambda s: s.bulk_received_bytes),
    (
        "peer_state_received_bytes_total",
        "Bytes of state received.",
        lambda s: s.state_received_bytes,
    ),
    ("peer_links", "Connected peers.", lambda s: len(s.links)),
    ("peer_lanes", "Connections for bulk data.", lambda s: sum(i.lanes for i in s.links)),
    ("peer_trainer_restarts_total", "Restarts of the trainer.", lambda s: s.trainer_restarts),
    (
        "peer_checkpoint_failing",
        "1 if the last checkpoint could not be written.",
        lambda s: bool(s.checkpoints.error),
    ),
)
# Of links that are up; a new link to the same peer counts from 0.
LINK: tuple[Figure[LinkRow], ...] = (
    ("peer_link_lanes", "Connections for bulk data to one peer.", lambda i: i.lanes),
    ("peer_link_round_trip_seconds", "Shortest round trip to one peer.", lambda i: i.round_trip_s),
    ("peer_link_sent_bytes_total", "Bytes sent to one peer.", lambda i: i.sent_bytes),
    (
        "peer_link_retransmitted_bytes_total",
        "Bytes to one peer that TCP sent again.",
        lambda i: i.retransmitted_bytes,
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
            logged = [
                ({"run": run, "peer": m.peer, "member": m.name}, m.metrics) for m in status.members
            ]
            yield _figures(logged)
        else:
            me = {"run": run, "peer": status.peer, "name": status.name}
            yield from _families(PEER, [(me, status)])
            names = {member.peer: member.name for member in status.members}
            links = [
                ({**me, "to": i.peer, "to_name": names.get(i.peer, "")}, i) for i in status.links
            ]
            yield from _families(LINK, links)
            logged = [({"run": run, "peer": status.peer, "member": status.name}, status.metrics)]
            yield _figures(logged)


def _info(status: Status, run: str) -> Metric:
    labels = {"run": run, "run_id": status.run_id, "kind": status.kind, "version": status.version}
    family = GaugeMetricFamily("holdfast_info", "Identity of this daemon.", labels=list(labels))
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


def _figures(logged: Iterable[tuple[Mapping[str, str], Mapping[str, float]]]) -> Metric:
    """Return the figures that training scripts log with ``run.log``, by member."""
    labels = ["run", "peer", "member", "figure"]
    family = GaugeMetricFamily("holdfast_figure", "Figures of run.log.", labels=labels)
    for member, figures in logged:
        for name, value in figures.items():
            family.add_metric([*member.values(), name], value)
    return family


class StandbyCollector(Collector):
    """Metrics of a master that waits while another one leads."""

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("holdfast_leads", LEADS, value=0.0)


def metrics_route(collector: Collector) -> Route:
    """Make the route ``GET /metrics``: figures of a collector, and of this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)

    async def metrics(_request: Request) -> Response:
        return Response(generate_latest(registry), headers={"Content-Type": MEDIA_TYPE})

    return Route("/metrics", metrics, methods=["GET"])
