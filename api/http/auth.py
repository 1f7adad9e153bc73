"""Authenticates callers by API key, and checks what their role may do."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader

from api.http.errors import Forbidden, NotFound, Unauthenticated

HEADER = "X-API-Key"
#: Longest key that is looked at, in characters; ours have about 50.
MAX_KEY = 256
#: Keys remembered; the one not used for longest goes first.
CACHE_SIZE = 10_000

scheme = APIKeyHeader(
    name=HEADER,
    scheme_name="ApiKey",
    auto_error=False,
    description="`POST /v1/users` shows a user's key once; an administrator's comes from the command line.",
)


class Role(StrEnum):
    USER = "user"
    OPERATOR = "operator"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of one API key. `user_id` is set for the role `user` only."""

    key_id: str
    role: Role
    user_id: str | None

    @property
    def staff(self) -> bool:
        return self.role in (Role.OPERATOR, Role.ADMIN)

    @property
    def actor(self) -> str:
        """How the audit trail names this caller."""
        return f"key:{self.key_id}"

    def may_see(self, user_id: str) -> bool:
        return self.staff or self.user_id == user_id


#: Finds the principal of a key; None if there is no such key, or it was revoked.
Lookup = Callable[[str], Awaitable[Principal | None]]


class Authenticator:
    """Remembers what it found for `ttl` seconds, so that an order does not pay for a look-up.

    Unknown keys are not remembered: a key works from the moment it exists.
    """

    def __init__(
        self, lookup: Lookup, ttl: float, clock: Callable[[], float] = time.monotonic, size: int = CACHE_SIZE
    ) -> None:
        self._lookup = lookup
        self._ttl = ttl
        self._clock = clock
        self._size = size
        self._known: OrderedDict[bytes, tuple[float, Principal]] = OrderedDict()

    async def principal(self, key: str | None) -> Principal:
        """Raises `Unauthenticated`, or what the look-up raises when the database is down."""
        if not key or len(key) > MAX_KEY:
            raise Unauthenticated
        digest = sha256(key.encode()).digest()
        now = self._clock()
        known = self._known.get(digest)
        if known is not None and known[0] > now:
            self._known.move_to_end(digest)
            return known[1]
        found = await self._lookup(key)
        if found is None:
            self._known.pop(digest, None)
            raise Unauthenticated
        self._known[digest] = (now + self._ttl, found)
        self._known.move_to_end(digest)
        if len(self._known) > self._size:
            self._known.popitem(last=False)
        return found


async def authenticate(request: Request, key: Annotated[str | None, Security(scheme)]) -> Principal:
    """The authenticated caller; raises `Unauthenticated`."""
    authenticator: Authenticator = request.app.state.services.authenticator
    principal = await authenticator.principal(key)
    request.state.principal = principal  # for the access log
    return principal


Caller = Annotated[Principal, Depends(authenticate)]


def require_staff(principal: Principal) -> None:
    """Raises `Forbidden` for a user's key."""
    if not principal.staff:
        raise Forbidden


def require_user(principal: Principal, user_id: str) -> None:
    """Raises `NotFound` when the caller may not see this user: whether it exists is not told."""
    if not principal.may_see(user_id):
        raise NotFound
