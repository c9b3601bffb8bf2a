"""``holdfast join``: identity, enrolment, the peer service, its bridge, its trainer and its HTTP side."""

from __future__ import annotations

import math
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import trio
from attrs import define, field
from starlette.routing import Route

from ... import __version__
from ...checkpoint.checkpoint_store import CheckpointStore, FolderStore, StoreError, place_at
from ...checkpoint.checkpoints import CheckpointError
from ...membership.master.status.status import copy_row, head_row
from ...membership.master.status.why_waiting import format_copy
from ...protocol.addresses import Address
from ...protocol.enrolment import enrol
from ...protocol.errors import EvictedError, RemoteProtocolError, UserError
from ...protocol.messages import RefusalCode, RelayOffer, Remedy, TrainerFailed
from ...protocol.network.sockets import SocketNetwork
from ...protocol.trust.authority import fingerprint_of, load_certificate
from ...protocol.trust.credentials import Credentials
from ...protocol.trust.identity import Identity
from ...protocol.trust.invite import Invite
from ...protocol.trust.notary import Notary
from ..advertised_hosts import doubt_of_loopback
from ..exit_codes import ExitCode
from ..memory_check import machine_bytes
from ..paths import CHECKPOINTS_FOLDER, OWN_STATE_FILE, make_private
from ..status_records import CheckpointStatus, LinkRow, PeerRoundRow, PeerStatus
from ..tasks import wait_for_signals
from ..web.app import Json
from ..web.http_server import control_side
from ..web.live_stream import LiveStream
from ..web.prometheus import metrics_route
from ..web.run_history import status_route
from .bridge import UnixBridge
from .checkpointer import Checkpointer
from .master_session import BACKOFF_FIRST_S, BACKOFF_MAX_S, no_master
from .peer_parts import PeerConfig
from .peer_service import PeerService
from .trainer_service import said_of
from .trainer_supervisor import TrainerEnd, TrainerSupervisor
from .volunteer_limits import DiskQuota

CERTIFICATE_LEFT_MIN_S = 3600.0  # with less left, the invite's token is used again
PARTIAL_FOLDER = "partial"  # in the state directory: blocks of a copy that is not whole yet
KEEPING_TOLD_S = 5.0  # between two words about how far the keeping of the state is
LENT_LOOK_S = 1.0  # between two looks whether the machine's owner wants it back
APPROVAL_S = 5.0  # between two questions whether the run's owner has approved this machine
FAREWELL_S = 120.0  # after the run's end, for the trainer to evaluate, save and exit


@define
class PeerOptions:
    invite: Invite
    command: Sequence[str]
    name: str
    state: Path
    listen: Sequence[Address]
    advertise: Sequence[Address]
    http: Address
    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None
    patience_s: float | None = 120.0
    site: str = ""
    checkpoints: str | None = None  # a folder or URL; None: in ``state``
    memory_bytes: int | None = None  # what its owner gives of the machine's; None: all
    disk_quota: DiskQuota | None = None  # of the disk; None: all
    relay: RelayOffer | None = None  # what is forwarded for others; None: nothing
    limits: Json = field(factory=dict)  # all that its owner has set, for people
    http_names: Sequence[str] = ()  # that the HTTP side answers to, beside this machine's own


class Peer:
    """A peer as a process: everything around ``PeerService``.

    Args:
      not_lent: asked every few seconds: why the machine's owner wants it back; empty: not now.

    Attributes:
      not_lent_why: this is why we left.
    """

    def __init__(
        self,
        options: PeerOptions,
        tell: Callable[[str], None],
        not_lent: Callable[[], str] = lambda: "",
    ) -> None:
        self.options = options
        self.tell = tell
        self.not_lent_why = ""
        self._not_lent = not_lent
        self._leaving = False
        self.service: PeerService | None = None
        self.supervisor: TrainerSupervisor | None = None
        self.bridge: UnixBridge | None = None
        self._signals = 0
        self._nursery: trio.Nursery | None = None
        self._error: UserError | None = None
        self._unfit = False  # the master refuses our script's model

    async def run(self) -> None:
        """Take part until the run is over, we leave, or are sent away.

        Raises:
          UserError: with the exit code for what went wrong.
        """
        options = self.options
        place = self._place()
        credentials = await self.credentials()
        network = SocketNetwork(credentials, newcomers=False)
        folder = Path(tempfile.mkdtemp(prefix="holdfast-"))  # sockets want short paths
        try:
            self.bridge = UnixBridge(folder / "trainer.sock")
            if options.command:
                self.supervisor = TrainerSupervisor(
                    options.command,
                    self.bridge.path,
                    member=credentials.identity.peer_id,
                    words=self.bridge.crash_report,
                    tell=self._trainer_failed,
                )
                self.bridge.ends = self.supervisor.fail
            config = PeerConfig(
                me=credentials.identity.peer_id,
                notary=Notary(options.invite.run_id, credentials.identity),
                name=options.name,
                run_id=options.invite.run_id,
                masters=options.invite.addresses,
                bind=options.listen,
                advertise=options.advertise,
                incarnation=secrets.randbits(62),
                upload_bytes_per_s=options.upload_bytes_per_s,
                download_bytes_per_s=options.download_bytes_per_s,
                patience_s=options.patience_s,
                site=options.site,
                asked=options.checkpoints is not None,
                local_checkpoint=str((options.state / OWN_STATE_FILE).absolute()),
                partial=options.state / PARTIAL_FOLDER,
                memory_bytes=min(filter(None, (machine_bytes(), options.memory_bytes))),
                disk_quota=self._allowance(place),
                partial_bytes=self._partial_bytes(place),
                relay=options.relay,
            )
            self.service = PeerService(
                config,
                network,
                self.bridge,
                renew=lambda: credentials.identity.request_pem(options.name),
                renewed=credentials.replace_certificate,
                checkpoints=place,
            )
            await self._restore(self.service, place)
            try:
                await self._serve(self.service)
            finally:
                await self._keep(self.service)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if self._error is not None:
            raise self._error
        self.tell("left the run")

    def _place(self) -> CheckpointStore:
        """Where our checkpoints are."""
        if self.options.checkpoints is None:
            return FolderStore(self.options.state / CHECKPOINTS_FOLDER)
        try:
            return place_at(self.options.checkpoints)
        except StoreError as error:
            raise UserError(
                str(error),
                exit_code=ExitCode.CONFIG,
                hint="install what it needs, or give a folder: --checkpoints DIR",
            ) from error

    def _allowance(self, place: CheckpointStore) -> DiskQuota | None:
        """Of this machine's disk; a place elsewhere is none of it."""
        return self.options.disk_quota if isinstance(place, FolderStore) else None

    def _partial_bytes(self, place: CheckpointStore) -> int | None:
        """What may be kept of a copy, beside the checkpoints that are here; None: all of it."""
        disk_quota = self.options.disk_quota
        if disk_quota is None:
            return None
        here = isinstance(place, FolderStore)
        used_bytes = sum(map(place.size_bytes, place.names())) if here else 0
        return disk_quota.left_bytes(used_bytes)

    async def _restore(self, service: PeerService, place: CheckpointStore) -> None:
        """Take up the newest checkpoint that is whole."""
        try:
            found = await trio.to_thread.run_sync(service.state_service.restore, place, self.tell)
        except CheckpointError as error:
            raise UserError(
                f"the checkpoints in {place} are not this run's: {error}",
                exit_code=ExitCode.CONFIG,
                hint="give the run a place of its own with --checkpoints (or --state)",
            ) from error
        except StoreError as error:
            raise UserError(
                f"cannot look for checkpoints: {error}",
                exit_code=ExitCode.CONFIG,
                hint="make the place usable, or give another one with --checkpoints",
            ) from error
        if found:
            restored = service.state_service.restored
            assert restored is not None
            self.tell(f"took up a checkpoint of step {restored.step}, {restored.rounds} rounds")

    async def _keep(self, service: PeerService) -> None:
        """Whatever ended us: the shared state outlives this process."""
        if self._unfit:
            return  # it has never had a part in the run, and will have none as it is
        last = service.checkpointer.last()
        if last is None:
            return
        size_bytes, writing = last
        self.tell(f"writing a last checkpoint ({size_bytes / 1e6:.1f} MB) ...")
        written_bytes = 0

        def work() -> None:
            nonlocal written_bytes
            for piece_bytes in writing:
                written_bytes += piece_bytes

        async def tell() -> None:
            while True:
                await trio.sleep(KEEPING_TOLD_S)
                self.tell(f"{written_bytes / 1e6:.0f} of {size_bytes / 1e6:.0f} MB written")

        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tell)
                try:
                    await trio.to_thread.run_sync(work)
                except StoreError as error:
                    self.tell(f"no last checkpoint: {error}")
                nursery.cancel_scope.cancel()

    async def credentials(self) -> Credentials:
        """Our identity and certificate: from the last time, or by the invite's token."""
        folder = make_private(self.options.state)
        identity = Identity.load_or_create(folder / "identity.key")
        known = _kept_credentials(folder, self.options.invite)
        if known is not None:
            return known
        self.tell("asking the master for admission ...")
        certificate, authority = await self._enrol(identity)
        return Credentials(folder, identity, certificate, authority)

    async def _enrol(self, identity: Identity) -> tuple[bytes, bytes]:
        """Admission by the invite's token; waits for a master that is not there yet, or for its owner
        to approve this machine."""
        invite, patience_s = self.options.invite, self.options.patience_s
        began_s, backoff_s, waiting = trio.current_time(), BACKOFF_FIRST_S, False
        while True:
            try:
                return await enrol(invite, identity, self.options.name)
            except EvictedError as error:
                if error.code != RefusalCode.APPROVAL.value:
                    raise as_user_error(error) from error
                if not waiting:
                    self.tell(f"{error.reason}; waiting for that ...")
                waiting, backoff_s, began_s = True, APPROVAL_S, trio.current_time()
            except RemoteProtocolError as error:
                raise UserError(
                    str(error),
                    exit_code=ExitCode.REFUSED,
                    hint=doubt_of_loopback(invite.addresses)
                    or "another program or run is at the invite's address: ask for a new invite",
                ) from error
            except OSError as error:
                if patience_s is not None and trio.current_time() - began_s > patience_s:
                    raise no_master(invite.addresses, str(error)) from error
                if backoff_s == BACKOFF_FIRST_S:
                    self.tell(f"{error}; trying again ...")
                    if doubt := doubt_of_loopback(invite.addresses):
                        self.tell(doubt)
            await trio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    async def _serve(self, service: PeerService) -> None:
        live = LiveStream(self.status, self.status)
        side = control_side(
            "peer",
            self.options.state,
            self.options.http,
            reads={},
            actions={"leave": self._act_leave, "retry": self._act_retry},
            why_unready=self.why_unready,
            routes=[
                status_route(lambda _past: self.status()),  # it keeps none
                Route("/api/live", live, methods=["GET"]),
                metrics_route(self.status),
            ],
            names=self.options.http_names,
        )
        with side as (serve_http, url):
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(wait_for_signals, self._on_signal)
                nursery.start_soon(serve_http)
                nursery.start_soon(live.run)
                if self.supervisor is not None:
                    nursery.start_soon(self._supervise, self.supervisor)
                nursery.start_soon(self._see_out)
                nursery.start_soon(self._give_back)
                self.tell(
                    f"peer {service.config.me[:8]} ({service.config.name}); dashboard at {url}"
                )
                try:
                    await service.run()
                except EvictedError as error:
                    self._error = self._error or as_user_error(error)
                    self._unfit = error.code == RefusalCode.LAYOUT.value
                nursery.cancel_scope.cancel()

    async def _supervise(self, supervisor: TrainerSupervisor) -> None:
        try:
            end = await supervisor.run()
        except UserError as error:
            self._error = error
            await self._leave("its training command cannot be started")
            return
        if end is TrainerEnd.STOPPED:
            return
        if self.service is not None and not self.service.finished.is_set():
            await self._leave("its training command ended by itself")
        elif self.service is not None:
            await self._leave("the run is finished")

    def _trainer_failed(self, failed: TrainerFailed) -> None:
        assert self.service is not None
        self.service.training.failed_with(failed)
        if failed.remedy is Remedy.NONE:
            self.tell(f"the trainer: {said_of(failed)}; until then this peer keeps a copy")

    async def _see_out(self) -> None:
        """After the run's end: let the trainer finish what it does, then go."""
        assert self.service is not None
        await self.service.finished.wait()
        self.tell("the run is finished")
        self._leaving = True
        if self.supervisor is not None:
            await trio.sleep(FAREWELL_S)
        await self._leave("the run is finished")

    async def _give_back(self) -> None:
        """Leave as soon as the machine's owner wants it back."""
        while not (why := self._not_lent()):
            await trio.sleep(LENT_LOOK_S)
        if self._leaving:
            return  # for good, and for another reason
        self.not_lent_why = why
        self.tell(f"leaving after the round in flight: {why}")
        await self._leave(why)

    async def _leave(self, reason: str) -> None:
        assert self.service is not None
        self._leaving = True
        await self.service.drain(reason)
        if self.supervisor is not None:
            # While it still has its daemon, so that it ends by our signal, not by an error.
            await self.supervisor.stop()
        self.service.stop()

    def _on_signal(self) -> None:
        self._signals += 1
        self.not_lent_why = ""  # whoever ends us does not want us to come back
        if self._signals > 1 or self.service is None or self._nursery is None:
            self._error = UserError("stopped without draining", exit_code=ExitCode.INTERRUPTED)
            if self.service is not None:
                self.service.stop()
            return
        self.tell("leaving after the round in flight (again: stop at once) ...")
        self._nursery.start_soon(self._leave, "stopped by its owner")

    # ------------------------------------------------------------ what people ask

    def status(self) -> PeerStatus:
        """Return this peer's status."""
        service = self.service
        assert service is not None
        replica, progress = service.replica, service.progress()
        return PeerStatus(
            kind="peer",
            version=__version__,
            attached=service.session.connected,
            peer=service.config.me,
            name=service.config.name,
            run_id=service.config.run_id,
            number=service.number,
            role=replica.role.value,
            in_sync=replica.in_sync,
            phase=service.report.phase,
            why="; ".join(map(format_copy, progress.copies))
            or service.report.why
            or service.training.why_still(),
            told=tuple(service.report.told),
            step=progress.step,
            tokens=progress.tokens,
            tokens_per_s=progress.tokens_per_s,
            loss=progress.loss,
            metrics=progress.metrics,
            links=tuple(
                LinkRow(
                    peer=peer,
                    lanes=len(link.lanes),
                    congestion=tuple(sorted({lane.facts.congestion for lane in link.lanes})),
                    round_trip_s=link.round_trip_s if link.round_trip_s < math.inf else None,
                )
                for peer, link in service.hub.links.items()
            ),
            bulk_sent_bytes=progress.bulk_sent_bytes,
            bulk_received_bytes=progress.bulk_received_bytes,
            state_received_bytes=progress.state_received_bytes,
            state_saved_bytes=progress.state_saved_bytes,
            copies=tuple(map(copy_row, progress.copies)),
            heads=tuple(map(head_row, replica.heads())),
            rounds=tuple(
                PeerRoundRow(
                    round=each.round,
                    fragment=each.fragment,
                    phase=each.phase.value,
                    attempt=each.attempt,
                )
                for each in replica.rounds.values()
            ),
            checkpoints=_checkpoints(service.checkpointer),
            finished=replica.finished,
            trainer_pid=None if self.bridge is None else self.bridge.attached_pid,
            command_pid=None if self.supervisor is None else self.supervisor.pid,
            trainer_restarts=0 if self.supervisor is None else self.supervisor.restarts,
            trainer_state=self._trainer_state(),
            waited_s=progress.waited_s,
            stepped_s=progress.stepped_s,
            limits=self.options.limits,
        )

    def why_unready(self) -> str:
        """Why this peer takes no part in its run now; empty: it does."""
        assert self.service is not None
        return "" if self.service.session.connected else "it is not attached to a master"

    def _trainer_state(self) -> str:
        assert self.service is not None
        training = self.service.training
        if training.layout is not None:
            return "running"
        if self.supervisor is not None and self.supervisor.failed is not None:
            return said_of(self.supervisor.failed)
        return "none" if self.supervisor is None else "starting"

    async def _act_retry(self, _body: Json) -> Json:
        if self.supervisor is None:
            raise UserError(
                "this peer has no training command",
                exit_code=ExitCode.USAGE,
                hint="join with one: holdfast join INVITE -- python train.py",
            )
        if not self.supervisor.retry():
            raise UserError(
                "the training command runs",
                exit_code=ExitCode.FAILED,
                hint="`holdfast status` says what it does",
            )
        return {"started": True}

    async def _act_leave(self, _body: Json) -> Json:
        self.not_lent_why = ""
        assert self._nursery is not None
        self._nursery.start_soon(self._leave, "asked to leave by its owner")
        return {"leaving": True}


def _checkpoints(checkpointer: Checkpointer) -> CheckpointStatus:
    newest = checkpointer.newest
    return CheckpointStatus(
        place=str(checkpointer.place),
        writing=checkpointer.writing,
        newest=None if newest is None else newest.name,
        step=None if newest is None else newest.step,
        error=checkpointer.error,
    )


def _kept_credentials(folder: Path, invite: Invite) -> Credentials | None:
    """Those of an earlier process, if they are still good for a while.

    Raises:
      UserError: they are another run's, and would be lost.
    """
    try:
        known = Credentials.load(folder)
    except FileNotFoundError:
        return None
    if fingerprint_of(load_certificate(known.authority_pem)) != invite.fingerprint:
        raise UserError(
            f"{folder} belongs to another run ({known.run_id}) than the invite",
            exit_code=ExitCode.CONFIG,
            hint="give this run a folder of its own with --state DIR, or delete that one if the "
            "other run is over",
        )
    return known if known.expires_in_s() > CERTIFICATE_LEFT_MIN_S else None


def as_user_error(error: EvictedError) -> UserError:
    exit_codes = {
        RefusalCode.KICKED.value: ExitCode.EVICTED,
        RefusalCode.QUARANTINED.value: ExitCode.EVICTED,
        RefusalCode.TOKEN.value: ExitCode.INVITE,
    }
    hints = {
        RefusalCode.VERSION.value: "install the run's version of holdfast",
        RefusalCode.TOKEN.value: "ask the run's owner for another invite",
        RefusalCode.RUN.value: "this invite is for another run than the master serves",
        RefusalCode.LAYOUT.value: "use the same model in the training script as the others",
        RefusalCode.FINISHED.value: "there is nothing left to train",
    }
    return UserError(
        error.reason,
        exit_code=exit_codes.get(error.code, ExitCode.REFUSED),
        hint=hints.get(error.code, ""),
    )
