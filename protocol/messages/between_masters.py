"""What the masters of one run tell each other."""

from __future__ import annotations

from attrs import field, frozen

from . import fields
from .parts import Message


@frozen
class TermClaim(Message):
    """Both sides, once: a master's term. The lower one gives way, of one term the start less
    followed.
    """

    run_id: str = field(validator=fields.run_id)
    term: int = field(validator=fields.count)
    nonce: bytes = field(validator=fields.nonce)
    followers: int = field(validator=fields.count)  # members that have attached in this term
