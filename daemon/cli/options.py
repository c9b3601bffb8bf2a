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
from ...protocol.messages import NAME_CHARS_MAX, SITE_CHARS_MAX
from ...protocol.text import escaped, unprintable
from ..paths import check_kind
from ..peer.volunteer_limits import Hours

if TYPE_CHECKING:
    from ...protocol.trust.invite import Invite

HOURS_MAX = 87_600.0  # ten years; for an invite


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
            raise click.BadParameter(f"{address} has a port: give {address.host}, for any port")
    return tuple(address.host for address in named)


def member_name(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    if not 1 <= len(value) <= NAME_CHARS_MAX or unprintable(value):
        raise click.BadParameter(f"a name has 1 to {NAME_CHARS_MAX} printable characters")
    return value


def parse_invite_option(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> str | None:
    """Return the invite, given as it is or as @FILE, and hide it from other users' process lists."""
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
    """Return the decoded invite and the state directory of the peer that joins with it.

    Args:
      default: returns the directory for a run's id and its authority's fingerprint; used without
        ``state``.

    Raises:
      UserError: the directory is a master's; or the invite is malformed, or has expired and there is
        no identity yet. A peer that was in the run needs no valid invite.
    """
    from ...protocol.trust.invite import Invite

    ticket = Invite.decode(invite, now_s=0.0)
    folder = state or default(ticket.run_id, ticket.fingerprint)
    check_kind(folder, "peer")
    if not (folder / "identity.key").exists():
        Invite.decode(invite)
    return ticket, folder


def site_name(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    if len(value) > SITE_CHARS_MAX or unprintable(value):
        raise click.BadParameter(f"a site name has up to {SITE_CHARS_MAX} printable characters")
    return value


def parse_hours(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> Hours | None:
    try:
        return None if value is None else Hours.parse(value)
    except UserError as error:
        raise click.BadParameter(f"{error}: {error.hint}") from error


class NumberInRange(click.FloatRange):
    """A finite number within a range."""

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
    help="The daemon's state directory (default: that of the only daemon running here).",
)
advertise_option = click.option(
    "--advertise",
    multiple=True,
    callback=dialable,
    help="HOST[:PORT] that other machines dial, if it differs from --listen; repeatable.",
)
http_host_option = click.option(
    "--http-host",
    metavar="NAME",
    multiple=True,
    callback=parse_hosts,
    help="Also answer HTTP requests for this host name, e.g. a proxy's or a container host's; repeatable.",
)
patience_option = click.option(
    "--patience",
    type=NumberInRange(min=0),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up after this time without a master; 0: never.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def tell(line: str) -> None:
    """Print one line and flush; control characters are escaped, so it stays one line."""
    click.echo(escaped(line))
    sys.stdout.flush()
