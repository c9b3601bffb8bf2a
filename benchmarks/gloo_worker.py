"""One rank of torch.distributed's gloo, for ``benchmarks.allreduce --vs gloo`` and ``benchmarks.lines``.

It waits on standard input for its turns (``begin``, then ``reduce`` again and again), and answers
each with a line of JSON. Between turns it does nothing, so that it disturbs nobody's measurement.
The sum is made in place, on memory that has been used before, which is the best case for gloo.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SIOCGIFADDR = 0x8915
TIMEOUT = timedelta(minutes=10)
CHECKED_VALUES = 2**16


def interface_of(address: str) -> str:
    """The network interface that has this IPv4 address; gloo wants its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _index, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise SystemExit(f"gloo_worker: no interface has the address {address}")


def begin(arguments: dict[str, Any]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(arguments["address"])
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{arguments['master']}:{arguments['port']}",
        rank=arguments["rank"],
        world_size=arguments["peers"],
        timeout=TIMEOUT,
    )


def reduce(
    values: torch.Tensor, initial: torch.Tensor, arguments: dict[str, Any]
) -> dict[str, Any]:
    values.copy_(initial)
    cpu_before_s = time.process_time()
    started_s = time.monotonic()
    dist.all_reduce(values)
    took_s = time.monotonic() - started_s
    cpu_s = time.process_time() - cpu_before_s
    scale = sum(range(1, arguments["peers"] + 1)) / (arguments["rank"] + 1)
    wanted = initial[:CHECKED_VALUES] * scale
    error = torch.linalg.norm(values[:CHECKED_VALUES] - wanted) / torch.linalg.norm(wanted)
    return {"s": took_s, "cpu_s": cpu_s, "error": float(error)}


def main() -> None:
    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    initial = torch.randn(arguments["values"], generator=generator) * (arguments["rank"] + 1)
    values = torch.empty_like(initial)
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        if line.strip() == "begin":
            begin(arguments)
        else:
            answer = reduce(values, initial, arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
