"""Succession of masters: which of several is obeyed, and when a new one may decide.

*Fencing.* Every master process begins a term of its own and draws a nonce. A peer obeys the highest
term that it has met, and of one term only the nonce that it met first; its ``Hello`` says both. A
master that hears of a higher term is superseded: from that call on it decides nothing, and its
process ends. Two starts on one backup begin the same term: the start that more members obey goes
on, of as many that with the higher nonce. Members that obey the other start are refused until the
next term.

*Succession.* A master that starts on the complete journal of its predecessor goes on where that one
stopped. A journal that was cut, or copied from another machine, may lack the last decisions: its
master is *behind* until it opens a round. It begins with a term and a round number beyond all that
can have been used. It decides nothing before more than half of the contributors named by its
journal have attached: from then on they obey no older master, and they say what they hold (see
``lineage``). The operator can shorten the wait by ``kick``: a removed peer is not waited for.
"""

from __future__ import annotations

from ....protocol.messages import MASTERS_MAX, Hello, Masters, RefusalCode
from ...shared.event_kind import EventKind
from .context import Context
from .journal import MastersKnown

NAMES_MAX = 8  # names in one sentence


class Succession:
    """The place of this master among the masters of its run."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.superseded = ""  # why this master must not go on; empty while it may
        history = context.history
        # Contributors named by the journal of a master that is behind, or all members if it names
        # none. Empty if the master is not behind.
        self.electorate: set[str] = set()
        if history.masters.behind:
            able = {record.peer for record in history.members.able()}
            self.electorate = set(history.members.places) or able
        self.attached: set[str] = set()  # members that have attached to this master, and so obey it
        self.elsewhere: set[str] = set()  # members that obey another start of this term

    # ------------------------------------------------------------ fencing

    def met(self, term: int, nonce: bytes, followers: int, who: str) -> bool:
        """Compare with a master of this term that ``who`` is, or has obeyed.

        Args:
          followers: members that obey that master, as far as this is known.

        Returns:
          True if this master is superseded.
        """
        own_term, own_nonce = self.context.term, self.context.history.masters.nonce
        ours = own_term, len(self.attached), own_nonce
        if not term or (term, nonce) == (own_term, own_nonce) or (term, followers, nonce) < ours:
            return False
        which = f"term {term}" if term > own_term else f"another start of term {term}"
        self.superseded = (
            f"another master has taken this run over ({which}; this one has term {own_term}), "
            f"says {who}"
        )
        return True

    def refuses(self, peer: str, hello: Hello) -> bool:
        """Note the master that a peer has obeyed; return whether it is not to be admitted."""
        context = self.context
        again = peer in self.elsewhere
        other = hello.term == context.term and hello.nonce != context.history.masters.nonce
        if other:
            self.attached.discard(peer)
            self.elsewhere.add(peer)
        if self.met(hello.term, hello.nonce, len(self.elsewhere), context.name(peer)):
            return True
        if other:
            why = f"obeys another start of term {hello.term}: start this master again, and it comes"
            context.drop(peer, RefusalCode.SUPERSEDED, f"this peer {why}")
            if not again:
                context.announce_peer(EventKind.JOIN, peer, why)
        return other

    def know(self, addresses: tuple[str, ...]) -> None:
        """Record the addresses of this master and its standbys, before those already known."""
        before = self.context.history.masters.addresses
        known = tuple(dict.fromkeys((*addresses, *before)))[:MASTERS_MAX]
        if known != before:
            self.context.record(MastersKnown(known))
            for member in self.context.roster:
                self.context.send(member.peer, Masters(known))

    # ------------------------------------------------------------ taking over

    def came(self, peer: str) -> bool:
        """Note that a peer has attached; return whether with it most of the electorate have."""
        before = self.waiting
        self.attached.add(peer)
        self.elsewhere.discard(peer)
        return self._announce_if_over(before)

    def kicked(self, peer: str) -> bool:
        """Take a peer out of the electorate; return whether no others are waited for now."""
        before = self.waiting
        self.electorate.discard(peer)
        self.attached.discard(peer)
        return self._announce_if_over(before)

    def _announce_if_over(self, before: bool) -> bool:
        if not before or self.waiting:
            return False
        self.context.announce(
            EventKind.RUN,
            None,
            f"{self._here} of {len(self.electorate)} contributors have attached: this "
            "master has taken the run over",
        )
        return True

    @property
    def _here(self) -> int:
        return len(self.electorate & self.attached)

    @property
    def waiting(self) -> bool:
        """Return whether too few members have attached for this master to decide anything."""
        return (
            self.context.history.masters.behind
            and bool(self.electorate)
            and not (2 * self._here > len(self.electorate))
        )

    def why_waiting(self) -> str:
        """Return a sentence about the members that are waited for."""
        absent = sorted(self.context.name(peer) for peer in self.electorate - self.attached)
        names = ", ".join(absent[:NAMES_MAX])
        if len(absent) > NAMES_MAX:
            names += f" and {len(absent) - NAMES_MAX} more"
        needed = len(self.electorate) // 2 + 1 - self._here
        return (
            f"this master takes the run over from a journal that may lack its last records: "
            f"{self._here} of {len(self.electorate)} contributors are here, it waits for "
            f"{needed} of {names} (`holdfast kick` removes those who will not come back)"
        )
