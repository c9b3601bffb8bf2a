"""The one hierarchy of errors: each class tells the code that catches it what to do."""

from __future__ import annotations

from collections.abc import Sequence

from .text import escaped, escaped_lines

# Why a trainer is sent away at the run's end; its daemon says so, or the trainer finds it itself.
NO_LAST_WEIGHTS = (
    "the run is over, but this peer did not get its last weights in time: take them from another"
    " peer's checkpoint (`holdfast export`)"
)


class HoldfastError(Exception):
    """Base of every error that holdfast raises on purpose.

    Its text may quote anything: the other side, a file, a library. The constructor escapes it, so
    it can be logged, printed and sent as it is.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(escaped(message))


class LocalProtocolError(HoldfastError):
    """This side broke the protocol: a bug in holdfast. Fix it; never retry."""


class RemoteProtocolError(HoldfastError):
    """The other side broke the protocol. Drop that connection, keep the run."""


class PeerLostError(HoldfastError):
    """A peer vanished. Repair, or retry under the next view.

    Attributes:
      peer: its peer id.
      reason: what this side saw (closed, reset, silent for N s).
    """

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"lost peer {peer[:8]}: {reason}")
        self.peer = peer
        self.reason = reason


class BadContributionError(HoldfastError):
    """A peer's contribution must not be added. Exclude that peer, rerun without it."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"refused the contribution of peer {peer[:8]}: {reason}")
        self.peer = peer
        self.reason = reason


class EvictedError(HoldfastError):
    """The master removed this peer. Rejoin or stop, as the code says.

    Attributes:
      code: one of ``messages.RefusalCode``'s values.
      reason: a sentence for people.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = escaped(reason)


class StateMismatchError(HoldfastError):
    """A copy of the state differs from the run's. Discard the copy, sync again.

    Attributes:
      blocks: indices of the blocks that are known to differ.
    """

    def __init__(self, reason: str, blocks: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.blocks = tuple(blocks)


class UserError(HoldfastError):
    """An error that the person at the keyboard can mend; shown as one line, never a traceback.

    Attributes:
      exit_code: the process's exit status; ``daemon.process.exit_codes`` lists them.
      hint: what to do next, or an empty string; Python's tracebacks show it, too.
    """

    def __init__(self, message: str, *, exit_code: int = 1, hint: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.hint = escaped_lines(hint)
        if self.hint:
            self.add_note(self.hint)


WRONG_CLOCK_EXIT_CODE = 6  # as for a master that does not answer
WRONG_CLOCK_HINT = "set the clock (on both machines), then try again"


class WrongClockError(RemoteProtocolError):
    """By this machine's clock the other end's certificate is not valid now: a clock is wrong."""


def cause_of(error: BaseException) -> BaseException:
    """Return the operating system's error behind a failed dial; trio wraps those of all tries."""
    while isinstance(error, OSError) and error.errno is None and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, BaseExceptionGroup):
        return cause_of(error.exceptions[0])
    return error
