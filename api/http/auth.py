"""Authenticates callers by API key, and refuses what their role may not do (`rights.py`).

A browser that logged in to the fleet page has the key of its session in a cookie instead. Whatever
changes something then needs the session's CSRF token in a header, too, which no other site's page
can read.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b, sha256
from hmac import compare_digest
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader
from starlette.requests import cookie_parser

from api.http.errors import Forbidden, KeySourceRefused, ScopeMissing, Unauthenticated
from api.http.rights import RIGHTS, STAFF, Role, Scope
from infra.database.engine import DatabaseUnavailable
from infra.database.users import UserDisabled
from infra.networks import Network, is_within

HEADER = "X-API-Key"
#: Cookie with the key of a session, and the header with its CSRF token.
COOKIE, CSRF_HEADER = "berth_session", "X-CSRF-Token"
_READS = frozenset({"GET", "HEAD"})
#: Longest key that is looked at, in characters; ours have about 85.
MAX_KEY_LENGTH = 256
#: Characters of an actor's name in the tables; its key's id takes 43 more.
_MAX_ACTOR_NAME_LENGTH = 80
#: Paths that are read also while PostgreSQL is away: by Prometheus, which waits for 10 s in all,
#: and by operators, who look for what is wrong. The look-up of a known key then has
#: `KNOWN_KEY_LOOKUP_TIMEOUT_S` seconds.
PATIENT_PATHS = frozenset({"/v1/metrics", "/", "/page/servers", "/page/pools", "/page/jobs"})
KNOWN_KEY_LOOKUP_TIMEOUT_S = 2.0
#: Keys remembered; the one not used for longest goes first.
MAX_CACHED_KEYS = 10_000

scheme = APIKeyHeader(
    name=HEADER,
    scheme_name="ApiKey",
    auto_error=False,
    description="`POST /v1/users` shows a user's key once; an administrator's comes from the "
    "command line.",
)


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of one API key. `user_id` is set for the role `user` only."""

    key_id: str
    role: Role
    user_id: str | None
    label: str = ""
    expires_at: datetime | None = None
    #: The id of the fleet page's own key, if the caller has one. `key_id` is the one that logged
    #: in.
    session: str = ""
    #: Its user is disabled.
    disabled: bool = False
    #: The scopes of the key; None: it may do all that its role may do.
    scopes: frozenset[Scope] | None = None
    #: The networks that may use it; empty: all.
    sources: tuple[Network, ...] = ()
    #: The applications whose jobs it may reach without the scope `jobs`.
    job_applications: frozenset[str] = frozenset()

    @property
    def seconds_left(self) -> float:
        """Until the key ends; infinity if it does not end by itself."""
        return (
            (self.expires_at - datetime.now(UTC)).total_seconds() if self.expires_at else math.inf
        )

    @property
    def staff(self) -> bool:
        return self.role in STAFF

    @property
    def actor(self) -> str:
        """Returns the name of this caller in the audit trail and in what else people read: the
        key's label comes first."""
        name = ", ".join(part for part in (self.user_id, self.label) if part)
        return (
            f"{name[:_MAX_ACTOR_NAME_LENGTH]} (key:{self.key_id})" if name else f"key:{self.key_id}"
        )

    def may_see(self, user_id: str) -> bool:
        return self.staff or self.user_id == user_id

    def require_right(self, route: str) -> None:
        """Raises `Forbidden` for a route of `RIGHTS` that the role may not call, and
        `ScopeMissing`."""
        right = RIGHTS.get(route)
        if right is None or self.role not in right.roles:
            raise Forbidden
        missing = right.missing_scope(self.role, self.scopes, self.job_applications)
        if missing is not None:
            raise ScopeMissing(
                f"This API key does not have the scope `{missing}`, which this call needs. Use a "
                "key that has it, or ask an administrator for one."
            )

    def applications_in_reach(self, *, to_look: bool = False) -> frozenset[str] | None:
        """Return the applications whose jobs the key may enqueue and cancel, or only look at.

        None: those of all applications, and jobs of Berth's built-in types.
        """
        is_enough = {Scope.JOBS, Scope.READ} if to_look else {Scope.JOBS}
        if self.scopes is None or self.scopes & is_enough:
            return None
        return self.job_applications

    def require_application(self, application: str, *, to_look: bool = False) -> None:
        """Raises `ScopeMissing` for jobs of an application that the key may not reach; an empty
        name stands for Berth's built-in types."""
        reach = self.applications_in_reach(to_look=to_look)
        if reach is not None and application not in reach:
            jobs_asked_for = (
                f"of the application {application}" if application else "of Berth's built-in types"
            )
            raise ScopeMissing(
                f"This API key is for jobs of {', '.join(sorted(reach))}, not for those "
                f"{jobs_asked_for}. Use a key that has their scope, or ask an administrator for "
                "one."
            )

    def require_source(self, address: str) -> None:
        """Raises `KeySourceRefused` for an address that may not use the key."""
        if self.sources and not is_within(address, self.sources):
            raise KeySourceRefused(
                f"This API key may not be used from {address or 'an unknown address'}. Call from "
                "an address on its list, or ask for a key whose list has this one."
            )


#: Finds the principal of a key; None if there is no such key, or it was revoked.
Lookup = Callable[[str], Awaitable[Principal | None]]


class Authenticator:
    """Remembers what it found for `ttl` seconds, so that an order does not pay for a look-up.

    Unknown keys are not remembered: a key works from the moment it exists. A revoked one is
    forgotten at once (`KeyRevocations`).
    """

    def __init__(
        self,
        lookup: Lookup,
        ttl: float,
        clock: Callable[[], float] = time.monotonic,
        size: int = MAX_CACHED_KEYS,
    ) -> None:
        self._lookup = lookup
        self._ttl = ttl
        self._clock = clock
        self._size = size
        self._known: OrderedDict[bytes, tuple[float, Principal]] = OrderedDict()
        #: The number of times that something was forgotten: what a look-up found before that may be
        #: out of date.
        self._forgotten = 0

    def forget(self, key_id: str) -> None:
        """Forgets a key, so that it is looked up again with its next request."""
        self._forgotten += 1
        for digest in [
            digest for digest, (_, principal) in self._known.items() if principal.key_id == key_id
        ]:
            del self._known[digest]

    def forget_all(self) -> None:
        self._forgotten += 1
        self._known.clear()

    def found_before(self, key: str) -> Principal | None:
        """Returns the principal of a key that was found when it was last looked up, perhaps some
        time ago."""
        known = self._known.get(_digest(key))
        return known[1] if known is not None else None

    async def principal(self, key: str | None, patience: float | None = None) -> Principal:
        """Raises `Unauthenticated`, or what the look-up raises when the database is down.

        With `patience`, in seconds, a database that is away leaves a known key valid: nobody can
        revoke it then, and all are forgotten when the database is back.
        """
        if not key or len(key) > MAX_KEY_LENGTH:
            raise Unauthenticated
        digest = _digest(key)
        now = self._clock()
        known = self._known.get(digest)
        if known is not None and known[0] > now:
            self._known.move_to_end(digest)
            return known[1]
        forgotten = self._forgotten
        try:
            async with asyncio.timeout(patience):
                principal = await self._lookup(key)
        except (TimeoutError, DatabaseUnavailable):
            if patience is None:
                raise
            if known is None or known[1].seconds_left <= 0:
                raise DatabaseUnavailable from None
            return known[1]
        if principal is None:
            self._known.pop(digest, None)
            raise Unauthenticated
        if forgotten != self._forgotten:
            return principal
        self._known[digest] = (now + min(self._ttl, principal.seconds_left), principal)
        self._known.move_to_end(digest)
        if len(self._known) > self._size:
            self._known.popitem(last=False)
        return principal


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def cookie_name(*, secure: bool, root_path: str) -> str:
    """Return the name of a new session's cookie.

    Browsers take a `__Host-` cookie only from this very host by TLS, and send it nowhere else; so
    neither another subdomain nor somebody on the network can put one there. It needs the path `/`:
    below a root path other applications of the host would get it, so `__Secure-` has to do there.
    """
    if not secure:
        return COOKIE
    return f"__Secure-{COOKIE}" if root_path else f"__Host-{COOKIE}"


def session_cookie(cookies: str, *, https: bool = False) -> tuple[str, str]:
    """Return name and value of the session's cookie in a Cookie header; two empty texts if there is
    none.

    One that only TLS can have set goes before a plain one, which does not count if the request came
    by TLS.
    """
    cookie_values = cookie_parser(cookies)
    for name in (f"__Host-{COOKIE}", f"__Secure-{COOKIE}", *(() if https else (COOKIE,))):
        if token := cookie_values.get(name):
            return name, token
    return "", ""


def session_token(cookies: str, *, https: bool = False) -> str:
    """Return the session's key in a Cookie header, or ''."""
    return session_cookie(cookies, https=https)[1]


def token_of_request(request: Request) -> str:
    """Return the session's key of a request, or ''."""
    return session_token(request.headers.get("cookie", ""), https=request.url.scheme == "https")


def csrf_token(session: str) -> str:
    """Derives the CSRF token of a session from its key."""
    return blake2b(session.encode(), digest_size=16, person=b"berth csrf").hexdigest()


def source_of(request: Request) -> str:
    """Returns the address of the client, behind the proxies that are trusted (`TrustedProxies`); ''
    if unknown."""
    return request.client.host if request.client else ""


def route_of(request: Request) -> str:
    """Returns the route of a request, as `RIGHTS` names it."""
    return f"{request.method} {request.scope['route'].path}"


async def identify(request: Request, key: Annotated[str | None, Security(scheme)]) -> Principal:
    """Returns the caller, by API key or session; raises `Unauthenticated`, `UserDisabled`,
    `KeySourceRefused`, or `Forbidden` without a CSRF token."""
    session = "" if key is not None else token_of_request(request)
    authenticator: Authenticator = request.app.state.services.authenticator
    patience = (
        KNOWN_KEY_LOOKUP_TIMEOUT_S
        if request.method in _READS and request.url.path in PATIENT_PATHS
        else None
    )
    principal = await authenticator.principal(key or session, patience)
    if bool(principal.session) != bool(session):
        raise Unauthenticated  # a session's key is no API key, and the other way round
    request.state.principal = principal  # for the access log
    principal.require_source(source_of(request))
    if session and request.method not in _READS:
        given = request.headers.get(CSRF_HEADER, "")
        if not compare_digest(given.encode(), csrf_token(session).encode()):
            raise Forbidden("the session's CSRF token is missing; load the page again")
    if principal.disabled:
        raise UserDisabled
    return principal


async def authenticate(request: Request, key: Annotated[str | None, Security(scheme)]) -> Principal:
    """Returns the authenticated caller; raises as `identify` and as `Principal.require_right`."""
    principal = await identify(request, key)
    principal.require_right(route_of(request))
    return principal


Caller = Annotated[Principal, Depends(authenticate)]
