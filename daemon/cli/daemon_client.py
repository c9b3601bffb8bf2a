"""The commands' client of the HTTP API of a daemon on this machine.

Answers are plain JSON here, which every command can afford to import; ``run_client`` reads them as
records.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...protocol.errors import UserError
from ...protocol.text import escaped
from ..process.exit_codes import ExitCode
from ..process.paths import DaemonAddress, find_control

if TYPE_CHECKING:
    import httpx

HTTP_S = 10.0  # a local daemon answers at once or not at all
LOOK_S = 1.0  # between two polls

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
    """Return a local daemon's answer to a GET or, with a body, a POST; raise UserError without."""
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
    """Return the one HTTP client; it ignores proxies, as the daemon is on this machine."""
    import httpx

    # Never closed: Ctrl+C may have left a lock of it taken, and the end of a process closes all.
    return httpx.Client(trust_env=False)


def _escaped(value: Any) -> Any:
    """Escape all texts of an answer for printing: an old journal may hold any characters."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    if isinstance(value, dict):
        return {escaped(key): _escaped(each) for key, each in value.items()}
    return value


def polled(state: Path | None, kind: str, see: Callable[[DaemonAddress], T]) -> Iterator[T]:
    """Ask a daemon once a second and yield its answers; raise UserError if the first one fails."""
    yield see(find_control(state, kind))
    while True:
        time.sleep(LOOK_S)
        with contextlib.suppress(UserError):  # it is away
            yield see(find_control(state, kind))
