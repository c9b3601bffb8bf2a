"""``holdfast relay`` as a process: credentials and the relay service."""

from __future__ import annotations

from collections.abc import Callable

import trio

from ....protocol.errors import EvictedError, UserError
from ....protocol.messages import RelayOffer
from ....protocol.network.sockets import SocketNetwork
from ...process.exit_codes import ExitCode
from ...process.tasks import wait_for_signals
from ..peer_credentials import as_user_error, obtain_credentials
from ..peer_options import PeerOptions
from .relay_service import RelayService


class Relay:
    """A relay as a process: everything around ``RelayService``.

    Args:
      options: the command and the limits for the state have no effect here.
      tell: takes sentences for the operator.
    """

    def __init__(
        self, options: PeerOptions, offer: RelayOffer, tell: Callable[[str], None]
    ) -> None:
        self.options = options
        self.offer = offer
        self.tell = tell
        self._signals = 0
        self._error: UserError | None = None

    async def run(self) -> None:
        """Forward until stopped or refused.

        Raises:
          UserError: with the exit code for what went wrong.
        """
        options = self.options
        credentials = await obtain_credentials(
            options.state, options.known_invite(), options.name, options.patience_s, self.tell
        )
        config = options.config(credentials, relay=self.offer)
        service = RelayService(config, SocketNetwork(credentials))
        async with trio.open_nursery() as nursery:

            def on_signal() -> None:
                self._signals += 1
                if self._signals > 1:
                    self._error = UserError("stopped at once", exit_code=ExitCode.INTERRUPTED)
                    nursery.cancel_scope.cancel()
                    return
                self.tell("leaving (again: stop at once) ...")
                nursery.start_soon(service.leave, "stopped by its owner")

            nursery.start_soon(wait_for_signals, on_signal)
            self.tell(f"relay {config.me[:8]} ({config.name})")
            try:
                await service.run()
            except EvictedError as error:
                self._error = as_user_error(error)
            nursery.cancel_scope.cancel()
        if self._error is not None:
            raise self._error
        self.tell(f"left the run; {service.work.desk.carried_bytes / 1e6:.1f} MB forwarded")
