"""Options that several commands share, and the parsing of their values."""

from __future__ import annotations

import gc
import math
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ...protocol.addresses import Address
from ...protocol.errors import UserError
from ...protocol.messages import NAME_CHARS_MAX
from ...protocol.text import decoded, escaped, unprintable
from ..process.paths import check_kind, locked

if TYPE_CHECKING:
    from ...protocol.trust.invite import Invite
    from ..process.screen import Screen

HOURS_MAX = 87_600.0  # ten years; for an invite
T = TypeVar("T")


class Parsed(click.ParamType[T]):
    """A value that ``parse`` makes of a text; what it raises for other texts is shown."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        if not isinstance(value, str):  # parsed already
            return cast(T, value)
        try:
            return self._parse(value)
        except UserError as error:
            self.fail(f"{error}: {error.hint}", param, ctx)


def _parse_host(text: str) -> str:
    address = Address.parse(text, default_port=0)
    if address.port:
        raise click.BadParameter(f"{address} has a port: give {address.host}, for any port")
    return address.host


def _parse_name(text: str) -> str:
    if not 0 < len(text) <= NAME_CHARS_MAX or unprintable(text):
        raise click.BadParameter(f"a name has 1 to {NAME_CHARS_MAX} printable characters")
    return text


def parse_invite_option(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> str | None:
    """Return the invite, given as it is or as @FILE, and hide it from other users' ``ps``."""
    from ..process.process_title import mask

    if value is None or not value.startswith("@"):
        if value is not None:
            mask(value)
        return value
    try:
        return decoded(Path(value[1:]).read_bytes()).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{value[1:]} cannot be read: {error}") from error


def entering(
    invite: str, state: Path | None, default: Callable[[str, str], Path]
) -> tuple[Invite, Path]:
    """Return the decoded invite and the state directory of the peer that joins with it.

    ``default`` returns the directory for a run's id and its authority's fingerprint. UserError is
    raised if the directory is a master's or the invite is no good; a peer that was in the run
    needs no valid one.
    """
    from ...protocol.trust.invite import Invite

    ticket = Invite.decode(invite, now_s=0.0)
    folder = state or default(ticket.run_id, ticket.fingerprint)
    check_kind(folder, "peer")
    if not (folder / "identity.key").exists():
        Invite.decode(invite)
    return ticket, folder


class NumberInRange(click.FloatRange):
    """A finite number within a range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


ADDRESS = Parsed("host:port", Address.parse)
MEMBER_NAME = Parsed("text", _parse_name)
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
POSITIVE = NumberInRange(min=0, min_open=True)

state_option = click.option(
    "--state",
    type=FOLDER,
    help="The daemon's state directory (default: that of the only daemon running here).",
)
name_option = click.option(
    "--name",
    default=lambda: socket.gethostname()[:NAME_CHARS_MAX],
    show_default="this host's name",
    type=MEMBER_NAME,
    help="This machine's name in status and logs.",
)
advertise_option = click.option(
    "--advertise",
    multiple=True,
    type=Parsed("host:port", partial(Address.parse, default_port=0)),
    metavar="HOST[:PORT]",
    help="HOST[:PORT] that other machines dial, if it differs from --listen; repeatable.",
)
http_host_option = click.option(
    "--http-host",
    metavar="NAME",
    multiple=True,
    type=Parsed("name", _parse_host),
    help=(
        "Also answer HTTP requests for this host name, e.g. a proxy's or a container host's;"
        " repeatable."
    ),
)
patience_option = click.option(
    "--patience",
    type=NumberInRange(min=0),
    default=120.0,
    metavar="SECONDS",
    help="Give up after this time without a master; 0: never.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="Print errors only; `holdfast status` tells the rest."
)


def screen(*, quiet: bool) -> Screen:
    """Return the screen of a daemon that runs in this terminal, to be entered."""
    from ..process.screen import Screen

    sys.stdout.flush()
    return Screen(sys.stdout.fileno(), quiet=quiet)


@contextmanager
def ready(folder: Path) -> Iterator[None]:
    """Lock a state directory, and prepare this process to be a daemon."""
    from ..process.this_machine import raise_descriptor_limit

    with locked(folder):
        gc.freeze()  # exempt the imported modules from garbage collection: they are never freed
        raise_descriptor_limit()
        yield


def tell(line: str) -> None:
    """Print one line and flush; control characters are escaped, so it stays one line."""
    click.echo(escaped(line))
    sys.stdout.flush()
