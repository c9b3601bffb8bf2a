"""Commands that send a request to a daemon on this machine and print its answer."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from ...protocol.text import plural
from ...protocol.trust.invite import Invite
from ..advertised_hosts import only_loopback
from ..process.paths import STANDBY, find_control, find_state, locked
from .daemon_client import call
from .options import FOLDER, HOURS_MAX, NumberInRange, json_option, state_option, tell

ONLY_HERE = (
    "note: this invite works only on the master's own machine; for other machines restart the"
    " master with --advertise HOST and make a new invite"
)


@click.command()
@state_option
@click.option(
    "--role",
    type=click.Choice(["contributor", "spare", "relay"]),
    default="contributor",
    help="Role of the machines that join with it.",
)
@click.option(
    "--uses", type=click.IntRange(1), default=1, help="Number of machines that may use it."
)
@click.option(
    "--hours",
    type=NumberInRange(min=0, min_open=True, max=HOURS_MAX),
    default=24.0,
    help="Hours until it expires.",
)
@click.option("--founder", is_flag=True, help="May supply the initial weights of a new run.")
@click.option("--approve", is_flag=True, help="Each machine must be approved: `holdfast approve`.")
@click.option("--list", "listed", is_flag=True, help="List all invites instead, with their ids.")
@click.option(
    "--withdraw", metavar="ID", help="Withdraw this invite instead. Peers that used it stay."
)
@json_option
def invite(
    state: Path | None,
    role: str,
    uses: int,
    hours: float,
    founder: bool,
    approve: bool,
    listed: bool,
    withdraw: str | None,
    as_json: bool,
) -> None:
    """Make an invite: a string that admits a machine to the run. Or list the invites, or withdraw
    one.

    \b
    Examples:
      holdfast invite
      holdfast invite --role spare --uses 3 --hours 48
      holdfast invite --list
    """
    control = find_control(state, "master")
    if withdraw is not None:
        answer = call(control, "withdraw", {"id": withdraw})
        click.echo(json.dumps(answer) if as_json else f"withdrew {withdraw}")
        return
    if listed:
        from .status_screen import show_invites

        answer = call(control, "invites", None)
        if as_json:
            click.echo(json.dumps(answer, indent=2))
        else:
            show_invites(answer)
        return
    body = {"role": role, "uses": uses, "hours": hours, "founder": founder}
    body["approve"] = approve
    answer = call(control, "invite", body)
    if as_json:
        click.echo(json.dumps(answer))
        return
    click.echo(answer["invite"])
    admits = f"invite {answer['id']}: admits {plural(uses, 'machine')} for {hours:g} hours"
    click.echo(admits, err=True)
    if only_loopback(Invite.decode(answer["invite"]).addresses):
        click.echo(ONLY_HERE, err=True)


@click.command()
@state_option
@json_option
def status(state: Path | None, as_json: bool) -> None:
    """Show what the master or peer on this machine is doing, and what it waits for.

    \b
    Examples:
      holdfast status
      holdfast status --json | jq .members
    """
    from .run_client import read_status
    from .status_screen import show_status

    control = find_control(state, None)
    if as_json:
        click.echo(json.dumps(call(control, "status", None), indent=2))
        return
    if control.kind == STANDBY:
        click.echo(call(control, "status", None)["why_waiting"])
        return
    show_status(read_status(call(control, "status", None, query={"past": 0})))


@click.command()
@state_option
@json_option
def leave(state: Path | None, as_json: bool) -> None:
    """Make the peer on this machine finish its round and leave (as Ctrl+C in its terminal does).

    \b
    Example:
      holdfast leave
    """
    answer = call(find_control(state, "peer"), "leave", {})
    click.echo(json.dumps(answer) if as_json else "leaving after the round in flight")


@click.command()
@click.argument("peer", required=False)
@state_option
@click.option("--refuse", is_flag=True, help="Refuse the machine permanently instead.")
@click.option("--reason", default="", show_default=False, help="Shown to the refused machine.")
@json_option
def approve(peer: str | None, state: Path | None, refuse: bool, reason: str, as_json: bool) -> None:
    """Admit the waiting machine PEER (name, or first digits of its id); without PEER, list those
    waiting.

    A machine waits if its invite was made with --approve, or if `membership.approve` is set. Only
    an approved machine uses up one use of the invite.

    \b
    Examples:
      holdfast approve
      holdfast approve 3fa92c
      holdfast approve 3fa92c --refuse --reason "who is that?"
    """
    control = find_control(state, "master")
    if peer is None:
        import msgspec

        from .run_client import format_pending, status_of_master

        rows = status_of_master(control).pending
        if as_json:
            click.echo(json.dumps({"pending": msgspec.to_builtins(rows)}, indent=2))
        for row in () if as_json else rows:
            tell(format_pending(row))
        if not rows and not as_json:
            tell("no machine waits for approval")
        return
    answer = call(control, "approve", {"peer": peer, "refuse": refuse, "reason": reason})
    verb = "approved" if answer["approved"] else "refused"
    click.echo(json.dumps(answer) if as_json else f"{verb} {answer['peer']} ({answer['name']})")


@click.command()
@click.argument("peer")
@state_option
@click.option("--reason", default="", show_default=False, help="Shown to the peer.")
@json_option
def kick(peer: str, state: Path | None, reason: str, as_json: bool) -> None:
    """Remove PEER (its name, or the first digits of its id) from the run permanently.

    \b
    Example:
      holdfast kick 3fa92c --reason "sends garbage"
    """
    answer = call(find_control(state, "master"), "kick", {"peer": peer, "reason": reason})
    click.echo(json.dumps(answer) if as_json else f"removed {answer['peer']} ({answer['name']})")


@click.command()
@click.argument("peer")
@state_option
@click.option("--back", is_flag=True, help="Let it take a place again.")
@json_option
def demote(peer: str, state: Path | None, back: bool, as_json: bool) -> None:
    """Make PEER a spare that takes no place, until it is taken back.

    \b
    Example:
      holdfast demote alder
    """
    answer = call(find_control(state, "master"), "demote", {"peer": peer, "back": back})
    done = "demoted" if answer["demoted"] else "took back"
    click.echo(json.dumps(answer) if as_json else f"{done} {answer['peer']} ({answer['name']})")


@click.command()
@state_option
@json_option
def pause(state: Path | None, as_json: bool) -> None:
    """Stop opening rounds; the current round continues. Trainers wait at the next round's step.

    \b
    Example:
      holdfast pause
    """
    answer = call(find_control(state, "master"), "pause", {})
    done = "the run was paused already" if answer["was_paused"] else "paused"
    click.echo(json.dumps(answer) if as_json else f"{done}; `holdfast resume` continues the run")


@click.command()
@state_option
@click.option(
    "--rounds",
    type=click.IntRange(0),
    help="Give the run this number of rounds in all, past ones included; 0: no end.",
)
@click.option(
    "--epochs",
    type=click.IntRange(0),
    help="Give the run this number of epochs of its data in all, past ones included; 0: no end.",
)
@json_option
def resume(state: Path | None, rounds: int | None, epochs: int | None, as_json: bool) -> None:
    """Continue a paused run, or with --rounds or --epochs a finished one.

    The peers of a finished run have left: start each again with its `holdfast join` command. They
    come back with their state and need no new invite.

    \b
    Examples:
      holdfast resume
      holdfast resume --rounds 80
    """
    control = find_control(state, "master")
    counts = {"round": rounds, "epoch": epochs}
    ends = {what: count for what, count in counts.items() if count is not None}
    before = call(control, "status", None, query={"past": 0}) if ends else {}
    answer = call(control, "resume", {f"{what}s": count for what, count in ends.items()})
    if as_json:
        click.echo(json.dumps(answer))
        return
    if not ends:
        click.echo("resumed" if answer["was_paused"] else "the run was not paused")
        return
    goals = [f"{what} {answer[f'{what}s']}" for what in counts if answer[f"{what}s"]]
    goes_on = f"the run goes on to {' or '.join(goals)}" if goals else "the run has no end now"
    click.echo(goes_on + ("; it was paused, and is resumed" if answer["was_paused"] else ""))
    if before["state"] == "finished":
        click.echo("its peers have left: start each again with its `holdfast join` command")
    lines = " and ".join(f"{what}s = {count}" for what, count in ends.items())
    click.echo(f"write {lines} into run.toml, too: the master's next start reads it")


@click.command()
@state_option
@json_option
def finish(state: Path | None, as_json: bool) -> None:
    """End the run early: with the round that comes next, or at once while none can come.

    Its peers save the final weights and leave, as at any run's end. `holdfast resume --rounds N`
    lets it go on.

    \b
    Example:
      holdfast finish
    """
    answer = call(find_control(state, "master"), "finish", {})
    rounds = answer["rounds"]
    text = (
        f"the run ends with its round {rounds}\nwrite rounds = {rounds} into run.toml, too: the"
        " master's next start reads it"
    )
    click.echo(json.dumps(answer) if as_json else text)


@click.command()
@click.argument("target", type=FOLDER)
@state_option
@click.option(
    "--every",
    type=NumberInRange(min=1),
    metavar="SECONDS",
    help="Repeat the copy at this interval, until Ctrl+C.",
)
@json_option
def backup(target: Path, state: Path | None, every: float | None, as_json: bool) -> None:
    """Copy the run's journal and keys to TARGET while the master runs.

    The copy is all that another machine needs to take the run over: `holdfast master --journal`.
    Keep it as secret as the state directory: it contains the private key of the run's authority.

    \b
    Examples:
      holdfast backup /mnt/standby/run
      holdfast backup /mnt/standby/run --every 10
    """
    from ..master.journal.journal_store import back_up

    folder = state or find_state()
    with locked(target):
        while True:
            count = back_up(folder, target)
            answer = {"target": str(target), "records": count}
            tell(json.dumps(answer) if as_json else f"copied {count} records to {target}")
            if every is None:
                return
            time.sleep(every)
