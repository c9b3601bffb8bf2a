"""Workloads whose members share lines, drawn by hypothesis."""

from __future__ import annotations

from attrs import frozen
from hypothesis import strategies as st

from holdfast.membership.planning.bandwidth import Bandwidth, LineCapacities, SiteLine
from holdfast.membership.planning.plan import PlanEstimate, make_plan
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol.messages import FragmentSize, Plan

PEERS = [f"{number:032x}" for number in range(16)]
rates = st.floats(1e5, 1e9)
bandwidths = st.builds(Bandwidth, rates, rates)


@frozen
class Sited:
    """A reduction, its lines, and the plan that is made for them."""

    size: FragmentSize
    contributors: list[str]
    receivers: list[str]
    lines: LineCapacities
    spec: RunSpec

    def planned(self, *, star_only: bool = False) -> tuple[Plan, PlanEstimate]:
        return make_plan(
            self.size,
            self.contributors,
            self.receivers,
            self.lines,
            self.spec,
            star_only=star_only,
        )


@st.composite
def sited(draw: st.DrawFn, codec: str | None = None, combine: str = "mean") -> Sited:
    """Any sites: of contributors, of listeners, of both, of all; narrow enough that trees pay."""
    count = draw(st.integers(1, 12))
    receivers = PEERS[: count + draw(st.integers(0, 4))]
    left = draw(st.permutations(receivers))
    sites: list[SiteLine] = []
    while len(left) >= 2 and len(sites) < 3:
        inside = draw(st.integers(2, len(left)))
        members, left = tuple(left[:inside]), left[inside:]
        inner = {peer: Bandwidth(100 * draw(rates), 100 * draw(rates)) for peer in members}
        sites.append(SiteLine(members, draw(bandwidths), inner))
    lines = LineCapacities({peer: draw(bandwidths) for peer in receivers}, sites=tuple(sites))
    name = codec or draw(st.sampled_from(["fp32", "int8", "nf4", "bf16+zstd"]))
    reduce = f'codec_up = "{name}"\ncodec_down = "{name}"\ncombine = "{combine}"'
    spec = RunSpec.parse(f"[reduce]\n{reduce}")
    size = FragmentSize(draw(st.integers(0, 3_000_000)), 0, draw(st.integers(0, 3)))
    return Sited(size, receivers[:count], receivers, lines, spec)
