"""``holdfast checkpoint now`` at the master: the peers that write checkpoints write one at once.

The master asks all members over the control streams. Each peer knows whether it writes checkpoints (see
``checkpointer``). It answers that at once, and reports the result later. No decision follows from either.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import trio

from ...membership.master.state.context import Context, format_member, quoted
from ...protocol.errors import UserError
from ...protocol.messages import CheckpointTold, Message, WriteCheckpoint
from ..exit_codes import ExitCode
from ..web.app import Json

ASK_S = (
    10.0  # for all first answers; a slower peer is listed without an answer, and may still write
)


class CheckpointAsker:
    """Ask for checkpoints and collect the answers.

    Args:
      tell: sends a message to a peer, if it is attached.
      note: makes a sentence about a peer an event.
    """

    def __init__(
        self,
        context: Context,
        tell: Callable[[str, Message], None],
        note: Callable[[str, str], None],
    ) -> None:
        self._context = context
        self._tell = tell
        self._note = note
        self._numbers = itertools.count(1)
        self._asked: dict[str, int] = {}  # by peer: the number of its unfinished order
        self._answers: dict[str, CheckpointTold] = {}  # to the newest order
        self._heard = trio.Event()

    def hear(self, peer: str, message: CheckpointTold) -> None:
        """Take a peer's answer; ignore it if it was not asked for."""
        if self._asked.get(peer) != message.number:
            return
        if peer not in self._answers:
            self._answers[peer] = message
            self._heard.set()
        if message.writes:
            return
        del self._asked[peer]
        name = self._context.name(peer)
        if message.name:
            self._note(peer, f"{name} has written checkpoint {quoted(message.name)}")
        elif self._answers[peer].writes:
            self._note(peer, f"{name} wrote no checkpoint: {quoted(message.reason)}")

    async def run(self) -> Json:
        """Ask all attached members; return which of them write.

        Raises:
          UserError: the run has no state yet, or no member writes checkpoints.
        """
        if not self._context.history.founded:
            raise UserError(
                "the run has no state yet", hint="wait until the founder's trainer has supplied it"
            )
        number = next(self._numbers)
        members = [member for member in self._context.roster.by_number() if not member.relay]
        self._asked = {member.peer: number for member in members}
        self._answers = {}
        for member in members:
            self._tell(member.peer, WriteCheckpoint(number))
        with trio.move_on_after(ASK_S):
            while any(
                member.peer in self._context.roster and member.peer not in self._answers
                for member in members
            ):
                self._heard = trio.Event()
                await self._heard.wait()
        answers = self._answers
        rows: list[Json] = []
        for member in members:
            answer = answers.get(member.peer)
            rows.append(
                {
                    "peer": member.peer,
                    "name": member.name,
                    "writes": answer is not None and answer.writes,
                    "why": "no answer yet" if answer is None else answer.reason,
                }
            )
        writers = [format_member(m) for m, row in zip(members, rows, strict=True) if row["writes"]]
        if not writers:
            whys = (
                "; ".join(f"{row['name']}: {row['why']}" for row in rows)
                or "the run has no members"
            )
            raise UserError(
                f"no peer writes a checkpoint: {whys}",
                exit_code=ExitCode.FAILED,
                hint="set `checkpoint.peers` in run.toml, or join a peer with `holdfast join --checkpoints`",
            )
        text = f"writing: {', '.join(writers)}; an event reports when each is done"
        return {"peers": rows, "text": text}
