"""Which part of a reduction takes a rank's processor time, by the clocks of its threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from holdfast.collectives import chunk_adder, result
from holdfast.protocol.network import lane
from holdfast.protocol.network.socket_lane import SocketLane

AES = "AES-GCM"
PLACES: tuple[tuple[str, Any, str], ...] = (
    ("sockets", SocketLane, "_send_all"),
    ("sockets", SocketLane, "_receive_all"),
    ("BLAKE3", result, "blake3"),
    ("adding", chunk_adder, "combine_chunk"),
)


class PartTimes:
    """Measures from here on: puts a clock around these functions, in this process."""

    def __init__(self) -> None:
        self._found: list[tuple[str, float]] = []  # threads append to it
        for part, owner, name in PLACES:
            setattr(owner, name, self._timed(part, getattr(owner, name)))
        vars(lane)["AESGCM"] = self._cipher

    def _cipher(self, key: bytes) -> SimpleNamespace:
        cipher = AESGCM(key)
        names = ("encrypt_into", "decrypt_into")
        return SimpleNamespace(**{name: self._timed(AES, getattr(cipher, name)) for name in names})

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began_s = time.thread_time()
            returned = function(*args)
            self._found.append((part, time.thread_time() - began_s))
            return returned

        return timed

    def take(self, process_s: float) -> dict[str, float]:
        """Return processor seconds by part since the last call, of so many of the process."""
        found, self._found = self._found, []
        seconds = dict.fromkeys([AES, *(part for part, _owner, _name in PLACES)], 0.0)
        for part, part_s in found:
            seconds[part] += part_s
        return {**seconds, "interpreter": process_s - sum(seconds.values())}
