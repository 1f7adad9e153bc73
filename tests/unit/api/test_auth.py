"""Keys are looked up once in a while, and roles see what they may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest

from api.container import AuthorizedCall, Services
from api.http.auth import Authenticator, Principal, session_token
from api.http.errors import NotFound, Unauthenticated
from api.http.rights import Role
from infra.database.engine import DatabaseUnavailable

ALICE = Principal("k1", Role.USER, "alice")
OPERATOR = Principal("k2", Role.OPERATOR, None)
ADMIN = Principal("k3", Role.ADMIN, None)


class Keys:
    """Looks keys up, and counts how often."""

    def __init__(self) -> None:
        self.known = {"key": ALICE}
        self.asked = 0
        self.now = 100.0
        self.during: Callable[[], None] | None = None

    async def __call__(self, token: str) -> Principal | None:
        self.asked += 1
        if self.during is not None:
            self.during()
        return self.known.get(token)

    slowness = 0.0

    async def slow(self, token: str) -> Principal | None:
        await asyncio.sleep(self.slowness)
        return await self(token)

    def authenticator(self, size: int = 100) -> Authenticator:
        return Authenticator(self, 10.0, lambda: self.now, size)


async def test_a_key_is_looked_up_once_within_its_time() -> None:
    keys = Keys()
    authenticator = keys.authenticator()
    for _ in range(3):
        assert await authenticator.principal("key") is ALICE
    assert keys.asked == 1
    keys.now += 10.1
    await authenticator.principal("key")
    assert keys.asked == 2


async def test_a_revoked_key_ends_with_its_time() -> None:
    keys = Keys()
    authenticator = keys.authenticator()
    await authenticator.principal("key")
    keys.known.clear()
    keys.now += 10.1
    with pytest.raises(Unauthenticated):
        await authenticator.principal("key")


async def test_a_forgotten_key_is_looked_up_again_also_by_a_look_up_that_was_under_way() -> None:
    keys = Keys()
    authenticator = keys.authenticator()
    await authenticator.principal("key")
    authenticator.forget("another")
    await authenticator.principal("key")
    assert keys.asked == 1
    authenticator.forget(ALICE.key_id)
    # Its revocation is committed in between.
    keys.during = lambda: authenticator.forget(ALICE.key_id)
    await authenticator.principal("key")
    keys.known.clear()
    with pytest.raises(Unauthenticated):
        await authenticator.principal("key")


@pytest.mark.parametrize("key", [None, "", "unknown", "x" * 300])
async def test_no_key_no_entry(key: str | None) -> None:
    with pytest.raises(Unauthenticated):
        await Keys().authenticator().principal(key)


async def test_the_memory_is_bounded() -> None:
    keys = Keys()
    keys.known = {f"key{n}": ALICE for n in range(5)}
    authenticator = keys.authenticator(size=2)
    for n in range(5):
        await authenticator.principal(f"key{n}")
    await authenticator.principal("key4")
    assert keys.asked == 5
    await authenticator.principal("key0")
    assert keys.asked == 6


def call_of(caller: Principal) -> AuthorizedCall:
    return AuthorizedCall(caller, cast(Services, None))


def test_a_user_sees_only_itself() -> None:
    call_of(ALICE).require_user("alice")
    with pytest.raises(NotFound):
        call_of(ALICE).require_user("bob")


@pytest.mark.parametrize("staff", [OPERATOR, ADMIN])
def test_operators_and_administrators_see_all_users(staff: Principal) -> None:
    call_of(staff).require_user("alice")


async def test_a_known_key_counts_while_the_database_is_away_for_those_who_may_rely_on_it() -> None:
    keys = Keys()
    authenticator = keys.authenticator()
    await authenticator.principal("key")
    keys.now += 10.1
    keys.during = _away
    assert await authenticator.principal("key", 0.1) is ALICE
    with pytest.raises(DatabaseUnavailable):
        await authenticator.principal("key")
    with pytest.raises(DatabaseUnavailable):
        await authenticator.principal("never seen", 0.1)
    authenticator.forget_all()
    with pytest.raises(DatabaseUnavailable):
        await authenticator.principal("key", 0.1)


async def test_no_ended_key_counts_while_the_database_is_away() -> None:
    keys = Keys()
    keys.known["key"] = replace(ALICE, expires_at=datetime.now(UTC) - timedelta(seconds=1))
    authenticator = keys.authenticator()
    await authenticator.principal("key")
    keys.during = _away
    with pytest.raises(DatabaseUnavailable):
        await authenticator.principal("key", 0.1)


async def test_a_database_that_does_not_answer_is_waited_for_so_long() -> None:
    keys = Keys()
    authenticator = Authenticator(keys.slow, 10.0, lambda: keys.now)
    await authenticator.principal("key")
    keys.now += 10.1
    keys.slowness = 60.0
    async with asyncio.timeout(5):
        assert await authenticator.principal("key", 0.05) is ALICE


def _away() -> None:
    raise DatabaseUnavailable


def test_a_cookie_that_only_tls_can_have_set_goes_first_and_a_plain_one_does_not_count_by_tls() -> (
    None
):
    planted, own = "berth_session=planted", "__Host-berth_session=own"
    assert session_token(f"{planted}; {own}") == "own"
    assert session_token(f"{planted}; __Secure-berth_session=own") == "own"
    assert session_token(planted) == "planted", "without TLS there is no other"
    assert session_token(planted, https=True) == ""
    assert session_token("") == ""
