"""The exit statuses of every ``holdfast`` command; `docs/cli.md` lists them."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """The exit status of a command."""

    OK = 0
    FAILED = 1  # any other error; see the message
    USAGE = 2  # a wrong option or argument
    CONFIG = 3  # run.toml or another input file is missing or invalid
    ADDRESS = 4  # the port is taken or the address is not this machine's
    INVITE = 5  # the invite is malformed, expired, used up or withdrawn
    UNREACHABLE = 6  # the master (or the local daemon) does not answer
    REFUSED = 7  # the master refuses this peer: version, layout, address, run over
    EVICTED = 8  # removed or refused by the run's operator, or removed by checks
    TRAINER = 9  # the training command cannot be started
    SUPERSEDED = 10  # another master has taken the run over; this one must stay stopped
    VIOLATION = 11  # a simulated run broke a promise
    MEMORY = 13  # the run's state does not fit into this machine's memory
    UNFIT = 14  # `doctor` found a fault that keeps this machine from taking part
    INTERRUPTED = 130  # a second Ctrl+C, or one before there was anything to drain
