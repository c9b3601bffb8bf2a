"""Options that several commands share, and the parsing of their values."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...protocol.addresses import Address
from ...protocol.errors import UserError
from ...protocol.messages import NAME_CHARS_MAX
from ...protocol.text import decoded, escaped, unprintable
from ..peer.volunteer_limits import Hours
from ..process.paths import check_kind

if TYPE_CHECKING:
    from ...protocol.trust.invite import Invite
    from ..process.screen import Screen

HOURS_MAX = 87_600.0  # ten years; for an invite


class AddressType(click.ParamType[Address]):
    """An address; its port may be left out if there is a default."""

    name = "host:port"

    def __init__(self, default_port: int | None = None) -> None:
        self._default_port = default_port

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Address:
        try:
            return value if isinstance(value, Address) else Address.parse(value, self._default_port)
        except UserError as error:
            self.fail(f"{error}: {error.hint}", param, ctx)


class HostType(click.ParamType[str]):
    """A host's name or address without a port."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        address = AddressType(default_port=0).convert(value, param, ctx)
        if address.port:
            self.fail(f"{address} has a port: give {address.host}, for any port", param, ctx)
        return address.host


class NameType(click.ParamType[str]):
    """A printable text of limited length; errors call it ``what``."""

    name = "text"

    def __init__(self, what: str, chars_min: int, chars_max: int) -> None:
        self._what = what
        self._chars_min = chars_min
        self._chars_max = chars_max

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not self._chars_min <= len(value) <= self._chars_max or unprintable(value):
            limits = f"{self._chars_min} to {self._chars_max} printable characters"
            self.fail(f"{self._what} has {limits}", param, ctx)
        return str(value)


class HoursType(click.ParamType[Hours]):
    """A part of the day."""

    name = "hours"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Hours:
        try:
            return value if isinstance(value, Hours) else Hours.parse(value)
        except UserError as error:
            self.fail(f"{error}: {error.hint}", param, ctx)


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


ADDRESS = AddressType()
MEMBER_NAME = NameType("a name", 1, NAME_CHARS_MAX)
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
POSITIVE = NumberInRange(min=0, min_open=True)

state_option = click.option(
    "--state",
    type=FOLDER,
    help="The daemon's state directory (default: that of the only daemon running here).",
)
advertise_option = click.option(
    "--advertise",
    multiple=True,
    type=AddressType(default_port=0),
    metavar="HOST[:PORT]",
    help="HOST[:PORT] that other machines dial, if it differs from --listen; repeatable.",
)
http_host_option = click.option(
    "--http-host",
    metavar="NAME",
    multiple=True,
    type=HostType(),
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


def tell(line: str) -> None:
    """Print one line and flush; control characters are escaped, so it stays one line."""
    click.echo(escaped(line))
    sys.stdout.flush()
