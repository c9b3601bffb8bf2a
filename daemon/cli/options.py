"""What options of several commands have in common: how values are read, and what is refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...protocol.addresses import Address
from ...protocol.errors import UserError
from ...protocol.messages import NAME_CHARS_MAX, SITE_CHARS_MAX
from ...protocol.text import escaped, unprintable
from ..peer.volunteer_limits import Hours

if TYPE_CHECKING:
    from ...protocol.trust.invite import Invite

HOURS_MAX = 87_600.0  # of an invite: ten years


def _parsed(text: str, default_port: int | None = None) -> Address:
    try:
        return Address.parse(text, default_port)
    except UserError as error:
        raise click.BadParameter(f"{error}: {error.hint}") from error


def parse_address_option(
    _context: click.Context, _parameter: click.Parameter, value: str
) -> Address:
    return _parsed(value)


def parse_addresses(
    _context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]
) -> tuple[Address, ...]:
    return tuple(_parsed(text) for text in value)


def dialable(
    _context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]
) -> tuple[Address, ...]:
    return tuple(_parsed(text, default_port=0) for text in value)


def parse_hosts(
    _context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]
) -> tuple[str, ...]:
    named = [_parsed(text, default_port=0) for text in value]
    for address in named:
        if address.port:
            raise click.BadParameter(f"{address} has a port: any port will do, give {address.host}")
    return tuple(address.host for address in named)


def member_name(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    if not 1 <= len(value) <= NAME_CHARS_MAX or unprintable(value):
        raise click.BadParameter(f"a name has 1 to {NAME_CHARS_MAX} printable characters")
    return value


def parse_invite_option(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> str | None:
    """An invite, or @FILE that one stands in. Others on this machine do not get to see it."""
    from ..process_title import mask

    if value is None or not value.startswith("@"):
        if value is not None:
            mask(value)
        return value
    try:
        return Path(value[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{value[1:]} cannot be read: {error}") from error


def entering(
    invite: str, state: Path | None, default: Callable[[str, str], Path]
) -> tuple[Invite, Path]:
    """An invite, and the state directory of whoever comes with it.

    Args:
      default: the directory for a run's id and its authority's fingerprint, if none is given.

    Raises:
      UserError: it is none, or it is over and there is no identity yet: who was in the run needs no
        invite that is still good.
    """
    from ...protocol.trust.invite import Invite

    ticket = Invite.decode(invite, now_s=0.0)
    folder = state or default(ticket.run_id, ticket.fingerprint)
    if not (folder / "identity.key").exists():
        Invite.decode(invite)
    return ticket, folder


def site_name(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    if len(value) > SITE_CHARS_MAX or unprintable(value):
        raise click.BadParameter(f"a site has up to {SITE_CHARS_MAX} printable characters")
    return value


def parse_hours(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> Hours | None:
    try:
        return None if value is None else Hours.parse(value)
    except UserError as error:
        raise click.BadParameter(f"{error}: {error.hint}") from error


class NumberInRange(click.FloatRange):
    """A number from a range; infinity and "not a number" are in none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


state_option = click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="The daemon's state directory (default: the only one that runs here).",
)
advertise_option = click.option(
    "--advertise",
    multiple=True,
    callback=dialable,
    help="HOST[:PORT] that others dial, if it is not the bound one; repeatable.",
)
http_host_option = click.option(
    "--http-host",
    metavar="NAME",
    multiple=True,
    callback=parse_hosts,
    help="Answer HTTP under this name, too: of a proxy before it, or of a container's host; repeatable.",
)
patience_option = click.option(
    "--patience",
    type=NumberInRange(min=0),
    default=120.0,
    show_default=True,
    help="Give up after so many seconds without a master; 0: never.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def tell(line: str) -> None:
    """Print a line at once, also into a pipe; whatever is quoted in it, it stays one line."""
    click.echo(escaped(line))
    sys.stdout.flush()
