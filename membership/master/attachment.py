"""Attachment of peers: a ``Hello`` is refused, or makes its peer a member that gets a ``Welcome``.

A peer has at most one connection. When it attaches again, the newer connection wins: the effects
begin with ``DropPeer(peer, DUPLICATE, previous=True)`` for the older one, whose end the daemon must
not report by ``detach``. The same incarnation is a reconnect and keeps its member number and its
place. Another incarnation is a new process and gets a new number; should the older process come
back, the newer one runs with a copy of its state folder, and is dropped for good (``COPY``). A
refused peer gets ``DropPeer(previous=False)``; its older connection, if there is one, stays.
"""

from __future__ import annotations

from collections import deque

from ...protocol import messages as m
from ..shared.event_kind import EventKind
from .hello_checks import PROCESSES_MAX, Processes, refusal
from .removal import Removal
from .state.context import Context, format_member, quoted
from .state.journal import PeerAdmitted
from .state.roster import Connection, Copy, Grant, Member, Trainer


class Attachment:
    """Admits peers to the roster and sends them the run's state."""

    def __init__(self, context: Context, removal: Removal) -> None:
        self.context = context
        self.removal = removal
        self._processes = Processes()
        self._replaced: dict[str, deque[int]] = {}  # by peer: incarnations that newer ones followed

    def refuse(self, peer: str, hello: m.Hello) -> bool:
        """Refuse a peer that may not enter. Returns True if it was refused."""
        refused = refusal(self.context, peer, hello)
        if refused is None and self._known_number(peer, hello) is None:
            refused = self._processes.refusal(peer, self.context.now_s)
        if refused is None:
            return False
        code, reason = refused
        self.context.announce(
            EventKind.JOIN, peer, f"{quoted(hello.name)} ({peer[:8]}) was refused: {reason}"
        )
        self.context.drop(peer, code, reason)
        return True

    def replace_connection(self, peer: str, hello: m.Hello) -> bool:
        """Close the peer's older connection. Returns True if it had one."""
        old = self.context.roster.get(peer)
        if old is None:
            return False
        again = old.incarnation == hello.incarnation
        code = m.RefusalCode.DUPLICATE
        reason = "it connected again" if again else "another process of this peer connected"
        replaced = self._replaced.setdefault(peer, deque(maxlen=PROCESSES_MAX))
        if hello.incarnation in replaced:
            code = m.RefusalCode.COPY
            reason = "another process with a copy of this state folder came first"
            replaced.clear()
        elif not again:
            replaced.append(old.incarnation)
        self.context.drop(peer, code, reason, previous=True)
        self.context.announce(EventKind.JOIN, peer, f"{format_member(old)}: {reason}")
        self.removal.remove(old, reason, keep_place=again)
        return True

    def admit(self, peer: str, hello: m.Hello, grant: Grant, connection: Connection) -> Member:
        """Add the peer to the roster, under the number of its process or under a new one."""
        history, now_s = self.context.history, self.context.now_s
        known = self._known_number(peer, hello)
        number = history.members.next_number if known is None else known
        if known is None:
            self.context.record(PeerAdmitted(peer, hello.name, number, hello.incarnation))
        member = self.context.roster.members[peer] = Member(
            peer=peer,
            name=hello.name,
            number=number,
            incarnation=hello.incarnation,
            grant=grant,
            attached_s=now_s,
            connection=connection,
            trainer=Trainer(hello.layout, now_s if hello.layout is None else None),
            copies=[Copy() for _ in history.versions],
            software=hello.software,
        )
        self.context.totals.attached(member, known=known is not None)
        self.context.detector.heard(peer, now_s)
        return member

    def _known_number(self, peer: str, hello: m.Hello) -> int | None:
        """Return the member number of a process that has attached before."""
        admitted = self.context.history.members.admitted.get(peer)
        if admitted is None or admitted.incarnation != hello.incarnation:
            return None
        return admitted.number

    def outcomes(self, hello: m.Hello) -> tuple[m.Commit, ...]:
        """Return the commits of rounds whose results the peer holds without the decision."""
        held = {(reduced.round, reduced.digest) for reduced in hello.undecided}
        return tuple(
            commit
            for commit in self.context.history.commits.values()
            if (commit.round, commit.digest) in held
        )

    def welcome(
        self,
        member: Member,
        committed: tuple[m.Commit, ...] = (),
        going_on: tuple[int, ...] = (),
    ) -> None:
        """Send the run's layout, versions and branch.

        Args:
          committed: see ``outcomes``.
          going_on: rounds whose reductions the member is to continue (see ``adoption``).
        """
        history = self.context.history
        self.context.send(
            member.peer,
            m.Welcome(
                version=m.VERSION_MAX,
                number=member.number,
                spec_toml=self.context.spec.toml_text,
                layout=history.layout,
                lineage=history.lineage,
                heads=history.heads(),
                step=history.step,
                committed=committed,
                term=self.context.term,
                nonce=history.masters.nonce,
                masters=history.masters.addresses,
                branch=history.rewinds.branch,
                going_on=going_on,
                total_steps=self.context.total_steps,
            ),
        )
