"""Keys are looked up once in a while, and roles see what they may."""

from __future__ import annotations

import pytest

from api.http.auth import Authenticator, Principal, Role, require_staff, require_user
from api.http.errors import Forbidden, NotFound, Unauthenticated

ALICE = Principal("k1", Role.USER, "alice")
OPERATOR = Principal("k2", Role.OPERATOR, None)
ADMIN = Principal("k3", Role.ADMIN, None)


class Keys:
    """A look-up that counts."""

    def __init__(self) -> None:
        self.known = {"key": ALICE}
        self.asked = 0
        self.now = 100.0

    async def __call__(self, token: str) -> Principal | None:
        self.asked += 1
        return self.known.get(token)

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


def test_a_user_sees_only_itself() -> None:
    require_user(ALICE, "alice")
    with pytest.raises(NotFound):
        require_user(ALICE, "bob")
    with pytest.raises(Forbidden):
        require_staff(ALICE)


@pytest.mark.parametrize("staff", [OPERATOR, ADMIN])
def test_operators_and_administrators_see_all_users(staff: Principal) -> None:
    require_user(staff, "alice")
    require_staff(staff)
