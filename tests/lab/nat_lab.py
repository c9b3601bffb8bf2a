"""An internet with routers in it: hosts with public addresses, behind NAT, behind firewalls, of
IPv6 only.

Every host and every router is a network namespace; a namespace called ``net`` is the internet
between them, one bridge. Routers are nftables: they masquerade (and keep ports, or draw others),
forward what they are told to, and drop whatever else comes from outside. Some map ports for those
who ask, by the real miniupnpd. All addresses are of ranges reserved for benchmarks, tests and
documentation; nothing leaves the machine.

    with NatLab([Router(), Router(keeps_ports=False)], [Place(), Place(router=0), Place(router=1)])
        as lab: lab.popen(1, ["nc", lab.address(0), "29700"])

Hosts are numbered as they are given; see ``Namespaces`` for how processes run on them.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import Factory, frozen

from benchmarks.namespaces import LabError, Namespaces, ip, missing_tool, try_bridge, why_none

PUBLIC = "198.18.0"  # and the host's number, from 1 on
# Of routers that map ports, which miniupnpd does only at an address that it takes for public: a
# range that was once reserved for tests (TEST-B), and is used by nobody.
PUBLIC_MAPPING = "128.66.0"
PUBLIC_6 = "2001:db8:1:"
ROUTER_FIRST = 200  # the last byte of the first router's public address
HOSTS_MAX = 100
ROUTERS_MAX = 50
# Whoever finds a dead connection by sending gives it up after so many tries, not after a quarter of
# an hour, so that tests need not wait.
RETRIES = "5"


@frozen
class Router:
    """A home's.

    Attributes:
      keeps_ports: a connection goes out from the port that it has inside, if that is free.
      forwards: host number by public port: what comes there from outside goes to that host.
      idle_cut_s: it forgets connections that are idle for so long; None: as the kernel does.
      hairpin: what hosts behind it send to its public address is forwarded, too, and back.
      maps: the protocols by which hosts behind it may have ports mapped: "pcp", "upnp".
      shuts_6: no IPv6 connection comes in that it was not asked to let in.
    """

    keeps_ports: bool = True
    forwards: Mapping[int, int] = Factory(dict)
    idle_cut_s: int | None = None
    hairpin: bool = True
    maps: tuple[str, ...] = ()
    shuts_6: bool = False


@frozen
class Place:
    """Where a host is.

    Attributes:
      router: behind which; None: it has a public address.
      ipv4, ipv6: what it has. Behind a router IPv6 is not translated, and not shut.
      shut: its own firewall lets nothing in that it has not asked for.
    """

    router: int | None = None
    ipv4: bool = True
    ipv6: bool = False
    shut: bool = False


def why_not() -> str:
    """Why this machine allows no lab; empty if it does, or lacks a tool only."""
    return "" if missing() else why_none(_try)


def missing() -> str:
    """Which command has to be installed first; empty if none."""
    return missing_tool("ip", "nft", "nsenter", "miniupnpd")


def _try(name: str) -> None:
    try_bridge(name)
    nft(name, "table ip try {\n chain c {\n type nat hook postrouting priority 100\n }\n}\n")


def nft(namespace: str, rules: str) -> None:
    """Load rules in a namespace."""
    command = ["ip", "netns", "exec", namespace, "nft", "-f", "-"]
    done = subprocess.run(command, input=rules, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"nft: {done.stderr.strip()}")


class NatLab(Namespaces):
    """Hosts, routers and the internet between them, for as long as the ``with`` block lasts.

    Raises:
      LabError: from ``with``: it cannot be made here.
    """

    def __init__(self, routers: Sequence[Router], places: Sequence[Place]) -> None:
        if not 1 <= len(places) <= HOSTS_MAX or len(routers) > ROUTERS_MAX:
            raise LabError(f"{len(places)} hosts and {len(routers)} routers")
        super().__init__()
        self._routers = list(routers)
        self._places = list(places)
        self._folders: list[Path] = []
        self._logs: dict[int, Path] = {}  # of miniupnpd, by router

    # ------------------------------------------------------------ for users

    def why_not(self) -> str:
        return why_not() or missing()

    def address(self, number: int) -> str:
        """The address that a host has itself: IPv4 if it has one."""
        place = self._places[number]
        if not place.ipv4:
            return f"[{self.address_6(number)}]"
        if place.router is None:
            return f"{PUBLIC}.{number + 1}"
        return f"10.77.{place.router}.{number + 2}"

    def address_6(self, number: int) -> str:
        place = self._places[number]
        if place.router is None:
            return f"{PUBLIC_6}:{number + 1:x}"
        return f"2001:db8:77:{place.router + 1:x}::{number + 2:x}"

    def outside(self, router: int) -> str:
        """The public address of a router."""
        network = PUBLIC_MAPPING if self._routers[router].maps else PUBLIC
        return f"{network}.{ROUTER_FIRST + router}"

    def until_mapping(self, router: int, seconds: float = 30.0) -> None:
        """Wait until a router answers those who ask for ports."""
        until_s = time.monotonic() + seconds
        log = self._logs[router]
        while "port" not in log.read_text():
            if time.monotonic() > until_s:
                raise LabError(f"miniupnpd does not begin: {log.read_text()[-500:]}")
            time.sleep(0.05)

    def move(self, number: int, last_byte: int) -> None:
        """A host gets another address in its network: a lease that ends, a laptop that roams."""
        old = self.address(number)
        new = f"{old.rpartition('.')[0]}.{last_byte}"
        inside = ("-n", self.host(number))
        ip(*inside, "addr", "del", f"{old}/24", "dev", "eth0")
        ip(*inside, "addr", "add", f"{new}/24", "dev", "eth0")
        if (router := self._places[number].router) is not None:
            ip(*inside, "route", "replace", "default", "via", f"10.77.{router}.1")

    # ------------------------------------------------------------ making

    def _make(self) -> None:
        for number in range(len(self._places)):
            self._add(str(number))
        self._net = self._add("net")
        self._bridge(self._net)
        ip("-n", self._net, "link", "set", "lo", "up")
        for number, router in enumerate(self._routers):
            self._make_router(number, router)
        for number, place in enumerate(self._places):
            self._make_host(number, place)

    def _make_host(self, number: int, place: Place) -> None:
        name = self.host(number)
        inside = ("-n", name)
        ip(*inside, "link", "set", "lo", "up")
        where = self._net if place.router is None else self.router_name(place.router)
        self._cable(where, f"h{number}", name, "eth0")
        if place.ipv4:
            ip(*inside, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        if place.ipv6:
            ip(*inside, "addr", "add", f"{self.address_6(number)}/64", "dev", "eth0", "nodad")
        if place.router is None and place.ipv4:
            ip(*inside, "route", "add", f"{PUBLIC_MAPPING}.0/24", "dev", "eth0")
        if place.router is not None:
            if place.ipv4:
                ip(*inside, "route", "add", "default", "via", f"10.77.{place.router}.1")
            if place.ipv6:
                gate = f"2001:db8:77:{place.router + 1:x}::1"
                ip(*inside, "-6", "route", "add", "default", "via", gate)
        elif place.ipv6:
            for router in range(len(self._routers)):
                there = f"2001:db8:77:{router + 1:x}::/64"
                gate = f"{PUBLIC_6}:{ROUTER_FIRST + router:x}"
                ip(*inside, "-6", "route", "add", there, "via", gate)
        self._set(name, "net.ipv4.tcp_retries2", RETRIES)
        if place.shut:
            nft(name, SHUT)

    def _make_router(self, number: int, router: Router) -> None:
        name = self._add(f"r{number}")
        inside = ("-n", name)
        ip(*inside, "link", "set", "lo", "up")
        self._bridge(name)
        ip(*inside, "addr", "add", f"10.77.{number}.1/24", "dev", "br0")
        lan_6 = f"2001:db8:77:{number + 1:x}::1/64"
        ip(*inside, "addr", "add", lan_6, "dev", "br0", "nodad")
        self._cable(self._net, f"r{number}", name, "wan")
        ip(*inside, "addr", "add", f"{self.outside(number)}/24", "dev", "wan")
        other = PUBLIC if router.maps else PUBLIC_MAPPING
        ip(*inside, "route", "add", f"{other}.0/24", "dev", "wan")
        wan_6 = f"{PUBLIC_6}:{ROUTER_FIRST + number:x}/64"
        ip(*inside, "addr", "add", wan_6, "dev", "wan", "nodad")
        self._set(name, "net.ipv4.ip_forward", "1")
        self._set(name, "net.ipv6.conf.all.forwarding", "1")
        if router.idle_cut_s is not None:
            idle = "net.netfilter.nf_conntrack_tcp_timeout_established"
            self._set(name, idle, str(router.idle_cut_s))
            # As many routers do, and this kernel does not unless told: what it has forgotten is
            # dropped.
            self._set(name, "net.netfilter.nf_conntrack_tcp_loose", "0")
        only = "" if router.hairpin else 'iifname "wan" '
        forwards = "\n".join(
            f"  {only}ip daddr {self.outside(number)} tcp dport {port} dnat to "
            f"{self.address(host)}:{port}"
            for port, host in router.forwards.items()
        )
        drawn = "" if router.keeps_ports else " random,fully-random"
        nft(
            name,
            ROUTER.format(drawn=drawn, forwards=forwards, lan=f"10.77.{number}.0/24"),
        )
        if router.maps or router.shuts_6:
            nft(name, MAPPED.format(rest_6="drop" if router.shuts_6 else "accept"))
        if router.maps:
            self._logs[number] = self._start_mapping(name, router.maps)

    def _start_mapping(self, name: str, protocols: tuple[str, ...]) -> Path:
        """Start miniupnpd on a router; return its log."""
        settings = Path(tempfile.mkdtemp(prefix="holdfast-miniupnpd-")) / "miniupnpd.conf"
        self._folders.append(settings.parent)
        settings.write_text(
            MINIUPNPD.format(
                pcp="yes" if "pcp" in protocols else "no",
                upnp="yes" if "upnp" in protocols else "no",
                uuid=uuid.uuid4(),
            )
        )
        log = settings.with_name("log")
        with log.open("w") as output:
            self.popen(
                self.names.index(name),
                ["miniupnpd", "-d", "-f", str(settings), "-P", str(settings.with_name("pid"))],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return log

    def _remove(self) -> None:
        super()._remove()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def router_name(self, number: int) -> str:
        """The name of a router's namespace."""
        return next(name for name in self.names if name.endswith(f"-r{number}"))

    def _set(self, namespace: str, name: str, value: str) -> None:
        path = "/proc/sys/" + name.replace(".", "/")
        script = f"echo {value} > {path}"
        done = subprocess.run(
            ["ip", "netns", "exec", namespace, "sh", "-c", script],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise LabError(f"{name}: {done.stderr.strip()}")


SHUT = """
table inet shut {
 chain in {
  type filter hook input priority 0; policy drop;
  ct state established,related accept
  iifname "lo" accept
  meta l4proto ipv6-icmp accept
 }
}
"""
ROUTER = """
table ip nat {{
 chain before {{
  type nat hook prerouting priority -100;
{forwards}
 }}
 chain after {{
  type nat hook postrouting priority 100;
  oifname "wan" masquerade{drawn}
  ip saddr {lan} oifname "br0" ct status dnat masquerade
 }}
}}
table ip filter {{
 chain in {{
  type filter hook input priority 0; policy accept;
  iifname "wan" ct state new,invalid drop
 }}
 chain through {{
  type filter hook forward priority 0; policy accept;
  ct state invalid drop
  ct state established,related accept
  iifname "wan" ct status dnat accept
  iifname "wan" drop
 }}
}}
"""

# What miniupnpd changes, and what it does not let in. Its chains must be in one table of the family
# inet.
MAPPED = """
table inet mapped {{
 chain miniupnpd {{
 }}
 chain before_miniupnpd {{
 }}
 chain after_miniupnpd {{
 }}
 chain through {{
  type filter hook forward priority 0; policy accept;
  ct state established,related accept
  jump miniupnpd
  iifname "wan" meta nfproto ipv6 meta l4proto != ipv6-icmp {rest_6}
 }}
 chain before {{
  type nat hook prerouting priority -100;
  jump before_miniupnpd
 }}
 chain after {{
  type nat hook postrouting priority 100;
  jump after_miniupnpd
 }}
}}
"""
MINIUPNPD = """
ext_ifname=wan
listening_ip=br0
enable_natpmp={pcp}
enable_upnp={upnp}
upnp_table_name=mapped
upnp_nat_table_name=mapped
upnp_forward_chain=miniupnpd
upnp_nat_chain=before_miniupnpd
upnp_nat_postrouting_chain=after_miniupnpd
secure_mode=yes
min_lifetime=2
uuid={uuid}
allow 1024-65535 10.77.0.0/16 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""
