"""Addresses as people type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.addresses import Address, host_of
from holdfast.protocol.errors import UserError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("203.0.113.7:7700", "203.0.113.7", 7_700),
        ("node.example:1", "node.example", 1),
        ("my_host-2:65535", "my_host-2", 65_535),
        ("[2001:db8::7]:80", "2001:db8::7", 80),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
        ("  [::]:0 ", "::", 0),
    ],
)
def test_addresses_are_read_and_written(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == text.strip()


@pytest.mark.parametrize(
    ("text", "host"),
    [("node", "node"), ("::1", "::1"), ("[::1]", "::1"), ("2001:db8::7700", "2001:db8::7700")],
)
def test_a_missing_port_is_the_default(text: str, host: str) -> None:
    assert Address.parse(text, 7_700) == Address(host, 7_700)
    with pytest.raises(UserError, match="names no port"):
        Address.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":80",
        "host:",
        "host:port",
        "host:-1",
        "host:65536",
        "host:٣",  # digits, but not ours
        "host:1_0",
        "a b:1",
        "user@host:1",
        "https://host:1",
        "host/path:1",
        "[::1",
        "[::1]80",
        "[host]:80",
        "[]:80",
        "[1:2:3]:80",
        "[fe80::1%]:80",
        "1:2:3:4",
        "-host:80",
        "h" * 256 + ":80",
        "x" * 100_000,
        "bücher.example:80",
    ],
)
def test_what_is_no_address_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UserError) as raised:
        Address.parse(text, 1)
    assert "host:port" in raised.value.hint
    assert len(str(raised.value)) < 400


hosts = st.one_of(
    st.ip_addresses().map(str),
    st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,30}[a-z0-9])?", fullmatch=True),
)


@given(hosts, st.integers(0, 65_535))
def test_addresses_round_trip(host: str, port: int) -> None:
    address = Address(host, port)
    assert Address.parse(str(address)) == address
    assert Address.parse(str(address), 1) == address


@pytest.mark.parametrize(
    ("remote", "host"),
    [
        ("203.0.113.7:7700", "203.0.113.7"),
        ("[2001:db8::7]:80", "2001:db8::7"),
        ("[fe80::1%eth0]:80", "fe80::1"),
        ("[::ffff:203.0.113.7]:80", "203.0.113.7"),
        ("a:0", "a"),
        ("a closed connection", ""),
    ],
)
def test_the_host_of_a_connection(remote: str, host: str) -> None:
    assert host_of(remote) == host
