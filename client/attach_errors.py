"""The errors of ``attach`` and ``run.step``, importable without torch."""

from __future__ import annotations

from ..protocol.errors import HoldfastError, UserError


class NoDaemonError(UserError):
    """The script runs without a daemon. Start it under ``holdfast join``."""


class AttachRefused(UserError):
    """The run does not take this script: change the script or the spec, as the text says."""


class ModelError(UserError):
    """The model holds a tensor that cannot be shared; the text names it."""


class MisuseError(UserError):
    """A call that a run does not take: after ``close``, from another thread, or after a fork."""


class DaemonGone(HoldfastError):
    """The daemon closed the socket or died. Stop: without it nothing here reaches the run."""
