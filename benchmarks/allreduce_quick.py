"""How long an all-reduce takes between processes of this machine, over TLS and encrypted lanes.

    python benchmarks/allreduce_quick.py --peers 2 --mebibytes 256 --rounds 7

The real network, hubs and reductions, without a master and without trainers. A round's time is that
of its slowest peer, from a common start to the whole result. ``--gloo`` measures
torch.distributed's gloo in the clear on the same machine instead.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.synchronize
import os
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import trio

from holdfast.collectives.allreduce import Reduction
from holdfast.collectives.hub import LinkHub
from holdfast.collectives.limiter import UploadLimiter
from holdfast.protocol.addresses import Address
from holdfast.protocol.authority import Authority
from holdfast.protocol.credentials import Credentials
from holdfast.protocol.identity import Identity
from holdfast.protocol.messages import (
    Contributor,
    FragmentSize,
    MemberInfo,
    OwnerRun,
    Plan,
    Reduce,
    Role,
)
from holdfast.protocol.network import Party
from holdfast.protocol.sockets import SocketNetwork

WARM_ROUNDS = 4  # not counted: fresh memory, also the kernel's, takes longer than a round

Barrier = multiprocessing.synchronize.Barrier


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def make_order(round_: int, peers: Sequence[str], count: int, chunk: int, codec: str) -> Reduce:
    chunks = -(-count // chunk)
    owned = [
        (chunks * (i + 1)) // len(peers) - (chunks * i) // len(peers) for i in range(len(peers))
    ]
    return Reduce(
        round=round_,
        attempt=1,
        fragment=0,
        version=0,
        view=1,
        contributors=tuple(Contributor(peer, 1, 1.0) for peer in peers),
        receivers=tuple(peers),
        plan=Plan(
            chunk,
            tuple(OwnerRun(peer, n) for peer, n in zip(peers, owned, strict=True) if n),
            codec,
            codec,
        ),
    )


def used_since(before: resource.struct_rusage, rounds: int) -> str:
    """What this process used for each of so many rounds."""
    now = resource.getrusage(resource.RUSAGE_SELF)
    user_s, system_s = now.ru_utime - before.ru_utime, now.ru_stime - before.ru_stime
    return (
        f"user {user_s / rounds:.3f} s, system {system_s / rounds:.3f} s, "
        f"{(now.ru_nvcsw - before.ru_nvcsw) // rounds} waits, "
        f"{(now.ru_nivcsw - before.ru_nivcsw) // rounds} preempted, "
        f"{(now.ru_minflt - before.ru_minflt) // rounds} faults, peak {now.ru_maxrss / 1024:.0f} MiB"
    )


async def run_peer(
    options: argparse.Namespace,
    rank: int,
    credentials: Credentials,
    members: Sequence[MemberInfo],
    barrier: Barrier,
    queue: multiprocessing.Queue[tuple[int, int, float]],
) -> None:
    network = SocketNetwork(credentials)
    me = members[rank].peer
    limiter = UploadLimiter(options.cap) if options.cap else None
    hub = LinkHub(network, me, limiter=limiter)
    count = int(options.mebibytes * 2**20) // 4
    values = np.random.default_rng(rank).standard_normal(count, dtype=np.float32)
    size = FragmentSize(count, 0, 0)
    async with trio.open_nursery() as nursery:
        address = Address.parse(members[rank].addresses[0])
        await nursery.start(network.serve, [address], hub.handle_channel, hub.handle_lane)
        await nursery.start(hub.run)
        hub.set_members(members)
        for member in members:
            if member.peer != me:
                await hub.link(member.peer)
        peers = [member.peer for member in members]
        for round_ in range(1, options.rounds + 1):
            order = make_order(round_, peers, count, options.chunk_kib * 256, options.codec)
            await trio.to_thread.run_sync(barrier.wait)
            if round_ == WARM_ROUNDS + 1:
                usage = resource.getrusage(resource.RUSAGE_SELF)
            start_s = time.perf_counter()
            reduction = Reduction(
                order, me, size, hub, network, values, None, values_stay=options.stay
            )
            result = await reduction.run()
            taken_s = time.perf_counter() - start_s
            queue.put((round_, rank, taken_s))
            if round_ == options.rounds:
                print(
                    f"  rank {rank}: {used_since(usage, round_ - WARM_ROUNDS)}, digest {result.digest.hex()[:8]}"
                )
            del result, reduction
        await trio.to_thread.run_sync(barrier.wait)
        nursery.cancel_scope.cancel()


def run_gloo(
    options: argparse.Namespace,
    rank: int,
    port: int,
    barrier: Barrier,
    queue: multiprocessing.Queue[tuple[int, int, float]],
) -> None:
    os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.peers)
    tensor = torch.randn(int(options.mebibytes * 2**20) // 4)
    for round_ in range(1, options.rounds + 1):
        barrier.wait()
        if round_ == WARM_ROUNDS + 1:
            usage = resource.getrusage(resource.RUSAGE_SELF)
        start_s = time.perf_counter()
        dist.all_reduce(tensor)
        queue.put((round_, rank, time.perf_counter() - start_s))
        if round_ == options.rounds:
            print(f"  rank {rank}: {used_since(usage, round_ - WARM_ROUNDS)}")
        tensor.mul_(1 / options.peers)
    barrier.wait()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--mebibytes", type=float, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunk-kib", type=int, default=1024)
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--cap", type=float, default=0, help="upload cap, bytes/s")
    parser.add_argument("--stay", action="store_true", help="the input stays as it is: no copy")
    parser.add_argument("--gloo", action="store_true")
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(options.peers), context.Queue()
    ports = free_ports(options.peers)
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.load_or_create(Path(folder), "run")
        credentials, members = [], []
        for rank, port in enumerate(ports):
            identity = Identity.generate()
            certificate = authority.issue(identity.request_pem(f"n{rank}"), f"n{rank}", Party.PEER)
            path = Path(folder) / f"n{rank}"
            credentials.append(Credentials(path, identity, certificate, authority.certificate_pem))
            addresses = (f"127.0.0.1:{port}",)
            members.append(
                MemberInfo(identity.peer_id, f"n{rank}", rank, addresses, Role.CONTRIBUTOR, True)
            )
        processes = []
        for rank in range(options.peers):
            if options.gloo:
                job = partial(run_gloo, options, rank, ports[0], barrier, queue)
            else:
                job = partial(
                    trio.run, run_peer, options, rank, credentials[rank], members, barrier, queue
                )
            processes.append(context.Process(target=job))
        for process in processes:
            process.start()
        times = [0.0] * (options.rounds + 1)
        for _ in range(options.rounds * options.peers):
            round_, _rank, taken_s = queue.get(timeout=60)
            times[round_] = max(times[round_], taken_s)
        for process in processes:
            process.join()
    what = "gloo" if options.gloo else "holdfast"
    median_s = statistics.median(times[1 + WARM_ROUNDS :])
    listed = " ".join(f"{each * 1e3:.1f}" for each in times[1:])
    print(
        f"{what} {options.peers} x {options.mebibytes:g} MiB: {median_s * 1e3:.1f} ms, best {min(times[1:]) * 1e3:.1f} ({listed})"
    )


if __name__ == "__main__":
    main()
