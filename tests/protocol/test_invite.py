"""Invites survive being copied, and damaged ones give an error with the reason."""

from __future__ import annotations

import base64
import hashlib

import msgpack
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.addresses import Address
from holdfast.protocol.errors import UserError
from holdfast.protocol.messages import RUN_ID, Role
from holdfast.protocol.trust.invite import PREFIX, Invite, generate_token

INVITE = Invite(
    "demo",
    (Address("203.0.113.7", 7_700), Address("2001:db8::7", 7_700), Address("node.example", 1)),
    hashlib.sha256(b"authority").hexdigest(),
    "secret-token",
    Role.CONTRIBUTOR,
    2_000_000_000,
)
NOW_S = 1_900_000_000.0


def invite_of(*fields: object) -> str:
    packed: bytes = msgpack.packb(fields)
    checked = packed + hashlib.sha256(packed).digest()[:4]
    return PREFIX + base64.urlsafe_b64encode(checked).decode().rstrip("=")


@given(
    st.builds(
        Invite,
        st.from_regex(RUN_ID, fullmatch=True),
        st.lists(
            st.builds(Address, st.ip_addresses().map(str), st.integers(0, 65_535)),
            min_size=1,
            max_size=16,
        ).map(tuple),
        st.binary(min_size=32, max_size=32).map(bytes.hex),
        st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=128),
        st.sampled_from(Role),
        st.integers(1, 2**63 - 1),
    )
)
def test_invites_round_trip(invite: Invite) -> None:
    text = invite.encode()
    assert text.startswith("holdfast1.")
    assert Invite.decode(text, now_s=0) == invite


@pytest.mark.parametrize(
    "run_id",
    ["../../../../.ssh", "..", ".", "", "a/b", "/etc", "a\\b", "a\0b", "-rf", "a b", "a" * 65, "é"],
)
def test_an_invite_that_names_a_folder_is_refused_before_anything_is_done(run_id: str) -> None:
    address = ["203.0.113.7:7700"]
    text = invite_of(run_id, address, bytes(32), "token", "contributor", 2_000_000_000)
    with pytest.raises(UserError, match="damaged"):
        Invite.decode(text, NOW_S)


def test_line_breaks_and_spaces_of_a_copy_do_no_harm() -> None:
    text = INVITE.encode()
    wrapped = "  " + "\n".join(text[at : at + 40] for at in range(0, len(text), 40)) + " \r\n"
    assert Invite.decode(wrapped, NOW_S) == INVITE


def test_every_truncation_is_noticed() -> None:
    text = INVITE.encode()
    for length in range(len(text)):
        with pytest.raises(UserError) as raised:
            Invite.decode(text[:length], NOW_S)
        assert raised.value.exit_code == 5
        assert raised.value.hint


@given(st.integers(0, 10_000), st.characters(min_codepoint=33, max_codepoint=0x2FF))
def test_every_changed_character_is_noticed(at: int, character: str) -> None:
    text = INVITE.encode()
    at %= len(text)
    changed = text[:at] + character + text[at + 1 :]
    try:
        invite = Invite.decode(changed, NOW_S)
    except UserError as error:
        code = error.exit_code
    else:
        code = 5
        assert invite == INVITE  # the same character, or bits that base64 does not use
    assert code == 5


def test_another_version_and_another_thing_are_told_apart() -> None:
    with pytest.raises(UserError, match="another version"):
        Invite.decode(INVITE.encode().replace("holdfast1.", "holdfast2."), NOW_S)
    with pytest.raises(UserError, match="does not start with"):
        Invite.decode("https://example.org", NOW_S)
    with pytest.raises(UserError, match="characters"):
        Invite.decode("x" * 1_000_000, NOW_S)


def test_an_expired_invite_says_when() -> None:
    Invite.decode(INVITE.encode(), INVITE.expires_s - 1)
    with pytest.raises(UserError, match="expired at 2033-05-18 03:33 UTC") as raised:
        Invite.decode(INVITE.encode(), INVITE.expires_s)
    assert raised.value.exit_code == 5
    with pytest.raises(UserError, match="expired"):
        Invite.decode(evolve(INVITE, expires_s=1_000_000_000).encode())


def test_well_packed_nonsense_is_refused() -> None:
    good = ["demo", ["h:1"], bytes(32), "token", "spare", 2_000_000_000]
    assert Invite.decode(invite_of(*good), NOW_S).role is Role.SPARE
    for index, junk in [
        (0, ""),
        (0, 1),
        (1, []),
        (1, ["h"]),
        (1, "h:1"),
        (1, ["h:1"] * 17),
        (2, bytes(31)),
        (2, "00" * 32),
        (3, ""),
        (3, "t" * 129),
        (4, "master"),
        (4, 1),
        (5, "2"),
        (5, True),
        (5, -1),
        (5, 2e9),
    ]:
        with pytest.raises(UserError) as raised:
            Invite.decode(invite_of(*good[:index], junk, *good[index + 1 :]), NOW_S)
        assert raised.value.exit_code == 5
    for fields in ([], good[:5], [*good, 1]):
        with pytest.raises(UserError):
            Invite.decode(invite_of(*fields), NOW_S)


def test_tokens_are_long_and_never_shown() -> None:
    tokens = {generate_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 32
    assert "secret-token" not in repr(INVITE)
