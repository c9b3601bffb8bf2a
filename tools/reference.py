"""Pages of docs/reference that are made from the code: ``python tools/reference.py``.

They are in the repository, where they can be read without a build; a test says when they are out of date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import click
import msgspec

from holdfast.daemon.cli.command_line import commands
from holdfast.daemon.metrics_store import PastEvent
from holdfast.daemon.status_records import MasterStatus, PeerStatus
from holdfast.daemon.web.app import DESCRIPTION
from holdfast.membership.master.status.records import RecordedRound
from holdfast.membership.spec.spec import RunSpec
from holdfast.membership.spec.spec_keys import MEANINGS
from holdfast.protocol import messages
from holdfast.protocol.wire import MESSAGES

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
RECORDS = [MasterStatus, PeerStatus, RecordedRound, PastEvent]
# Schemas that no record stands behind.
BY_HAND = (
    *("Error", "EventKind", "Events", "Health", "History", "InviteRow", "Invites", "Point"),
    *("Readiness", "Refusal", "Rounds", "Status"),
)


def run_toml() -> str:
    lines = [
        "# run.toml",
        "",
        "What the run's owner decides. Every key has a default; unknown tables and keys are refused, with the",
        "one that was probably meant. Peers get the file from the master when they attach. A master that is",
        "started again with a changed file goes on with the changed values, except for `fragments`, `pattern`",
        "and `groups`, which belong to the state: that is refused. `holdfast config check run.toml` says what a",
        "master would refuse, and what is allowed and probably not meant.",
    ]
    spec = RunSpec()
    for table in attrs.fields(RunSpec):
        values = getattr(spec, table.name)
        if not attrs.has(type(values)):
            continue
        lines += [
            "",
            f"## [{table.name}]",
            "",
            "| key | default | meaning |",
            "| --- | --- | --- |",
        ]
        for key in attrs.fields(type(values)):
            default = json.dumps(getattr(values, key.name))
            meaning = MEANINGS[f"{table.name}.{key.name}"]
            lines.append(f"| `{key.name}` | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- commands


def command_pages() -> str:
    lines = [
        "# Commands",
        "",
        "`holdfast COMMAND --help` says the same. Every option but `--json` can be a variable",
        "`HOLDFAST_COMMAND_OPTION`, such as `HOLDFAST_JOIN_MAX_UPLOAD=6`; flags win. What exit statuses mean is in",
        "[Commands at a glance](../cli.md).",
    ]
    for name, command in sorted(commands.commands.items()):
        lines += _command(f"holdfast {name}", command)
    return "\n".join(lines) + "\n"


def _command(path: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    arguments = " ".join(
        parameter.make_metavar(context)
        for parameter in command.params
        if isinstance(parameter, click.Argument)
    )
    yield from ("", f"## {path}", "", "```text", f"{path} {arguments}".strip(), "```", "")
    text, _, examples = (command.help or "").partition("\b")
    yield "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))
    if shown := [line.strip() for line in examples.splitlines() if "holdfast " in line]:
        yield from ("", "```sh", *shown, "```")
    options = [each for each in command.params if isinstance(each, click.Option)]
    if options:
        yield from ("", "| option | meaning |", "| --- | --- |")
    for option in options:
        record = option.get_help_record(context)
        if record is not None:
            spelled, meaning = (" ".join(part.split()).replace("|", "/") for part in record)
            yield f"| `{spelled}` | {meaning} |"
    if isinstance(command, click.Group):
        for name, each in sorted(command.commands.items()):
            yield from _command(f"{path} {name}", each)


# ---------------------------------------------------------------- messages


def message_page() -> str:
    lines = [
        "# Messages",
        "",
        f"All that may cross a control stream, in protocol version {messages.VERSION_MAX}. Limits of the fields are",
        "their validators in `protocol/messages.py`.",
        "",
        "| message | what it says | fields |",
        "| --- | --- | --- |",
    ]
    for name, kind in sorted(MESSAGES.items()):
        said = (kind.__doc__ or "").strip().partition("\n\n")[0]
        fields = ", ".join(f"`{field}`" for field in attrs.fields_dict(kind))  # type: ignore[arg-type]
        lines.append(f"| `{name}` | {_flat(said)} | {fields} |")
    return "\n".join(lines) + "\n"


def _flat(text: str) -> str:
    return re.sub(r"``([^`]*)``", r"`\1`", " ".join(text.split())).replace("|", "\\|")


# ---------------------------------------------------------------- the API's description


def openapi() -> str:
    """Return ``daemon/web/openapi.json`` with the schemas of the status' records made again."""
    document = json.loads(DESCRIPTION.read_text())
    written = document["components"]["schemas"]
    _kinds, made = msgspec.json.schema_components(
        RECORDS, ref_template="#/components/schemas/{name}"
    )
    for schema in made.values():
        schema.pop("title", None)
        if "properties" in schema:
            schema["additionalProperties"] = False
    for name in ("PastEvent", "EventRow"):
        made[name]["properties"]["kind"] = {"$ref": "#/components/schemas/EventKind"}
    document["components"]["schemas"] = dict(
        sorted({**{name: written[name] for name in BY_HAND}, **made}.items())
    )
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


PAGES = {
    FOLDER / "run-toml.md": run_toml,
    FOLDER / "commands.md": command_pages,
    FOLDER / "messages.md": message_page,
    DESCRIPTION: openapi,
}


if __name__ == "__main__":
    for path, make in PAGES.items():
        path.write_text(make())
