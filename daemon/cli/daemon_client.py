"""The commands' client of the HTTP API of a daemon on this machine.

Answers are plain JSON here, which every command can afford to import; ``run_client`` reads them as records.
"""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ...protocol.errors import UserError
from ...protocol.text import escaped
from ..exit_codes import ExitCode
from ..paths import DaemonAddress, find_control

if TYPE_CHECKING:
    import httpx

HTTP_S = 10.0  # a local daemon answers at once or not at all
LOOK_S = 1.0  # between two polls
LOOK_HTTP_S = 2.0  # timeout of a poll; a key press waits as long

Json = dict[str, Any]
T = TypeVar("T")


def call(
    control: DaemonAddress,
    name: str,
    body: Mapping[str, object] | None,
    *,
    query: Mapping[str, str | int] | None = None,
    timeout_s: float = HTTP_S,
) -> Json:
    """Send a request to a local daemon and return its answer: a GET without ``body``, else a POST.

    Raises:
      UserError: the daemon does not answer, or answers with an error.
    """
    import httpx  # takes a tenth of a second, which only the commands that send requests need

    url = f"{control.url}/api/{name}"
    headers = {"authorization": f"Bearer {control.token}"} if control.token else {}
    try:
        if body is None:
            response = _client().get(url, params=query, headers=headers, timeout=timeout_s)
        else:
            response = _client().post(url, json=dict(body), headers=headers, timeout=timeout_s)
        answer = _escaped(response.json())
    except (httpx.HTTPError, ValueError) as error:
        raise UserError(
            f"the {control.kind} at {control.url} does not answer: {error}",
            exit_code=ExitCode.UNREACHABLE,
        ) from error
    if response.status_code != 200:
        raise UserError(
            str(answer.get("error", response.text)),
            exit_code=int(answer.get("exit_code", ExitCode.FAILED)),
            hint=str(answer.get("hint", "")),
        )
    result: Json = answer
    return result


@functools.cache
def _client() -> httpx.Client:
    """Return the command's one HTTP client, so that repeated polls share a connection.

    The client ignores proxy variables of the environment: the daemon is on this machine.
    """
    import httpx

    client = httpx.Client(trust_env=False)
    atexit.register(client.close)
    return client


def _escaped(value: Any) -> Any:
    """Escape all texts of an answer for printing: an older version's journal may hold any characters."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    if isinstance(value, dict):
        return {escaped(key): _escaped(each) for key, each in value.items()}
    return value


class Poller(Generic[T]):
    """Repeated requests to one daemon, which may be restarted in between.

    Args:
      see: the request to make at each poll.

    Attributes:
      control: the daemon found by the last poll.
      away_since: time of the first unanswered poll, by ``time.monotonic``; None while it answers.
    """

    def __init__(
        self, state: Path | None, kind: str | None, see: Callable[[DaemonAddress], T]
    ) -> None:
        self._state = state
        self._see = see
        self.control = find_control(state, kind)
        self.away_since: float | None = None

    def look(self) -> T | None:
        """Poll once; return the snapshot, or None if the daemon does not answer."""
        try:
            self.control = find_control(self._state, self.control.kind)
            seen = self._see(self.control)
        except UserError:
            if self.away_since is None:
                self.away_since = time.monotonic()
            return None
        self.away_since = None
        return seen


def see_json(control: DaemonAddress) -> Json:
    """Return the present status as JSON, for a ``Poller``."""
    return call(control, "status", None, query={"past": 0}, timeout_s=LOOK_HTTP_S)
