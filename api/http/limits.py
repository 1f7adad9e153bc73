"""Limits of requests: of each API key, of each user, and of each address for all other requests.

A request waits for no round trip: each process counts by itself, and every `SETTLE_INTERVAL_S`
tells Valkey what it let through and learns what the others did (`spend_requests.lua`). So a limit
holds over all processes, but for what they let through in one period. While Valkey is away, it
holds in each process.

Only a key or webhook that PostgreSQL has gets a limit of its own. A token that is genuine by its
MAC may be revoked, or of another kind, and a hundred of those must not have a hundred limits: until
one is found, all such requests of an address share one limit (`unproven`). It is not that of
made-up keys: whoever shares an address with an attacker is not shut out. A key pays from it once in
the life of a process.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from hashlib import blake2b
from ipaddress import ip_network

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.types import Scope

from api.http.auth import HEADER, Authenticator, session_token
from api.http.errors import TooManyRequests
from api.http.proxies import UNKNOWN_SOURCE
from infra.networks import is_within, parse_address
from infra.process_metrics import LIMITED
from infra.settings import Settings
from infra.valkey import client as valkey
from infra.vault.api_tokens import API_KEY_PREFIX
from worker_runtime.protocol import keys, scripts

#: Seconds between two settlements with Valkey.
SETTLE_INTERVAL_S = 0.2
#: Seconds' worth of requests that may come at once.
BURST_WINDOW_S = 5.0
#: Limits that one process remembers.
MAX_REMEMBERED_LIMITS = 20_000
#: Limits that one script settles: 2 µs each in Valkey.
MAX_LIMITS_PER_SETTLEMENT = 500
#: Bits of the network that one customer of an IPv6 provider has at least (RFC 6177).
IPV6_NETWORK_BITS = 64
#: Seconds between two lines in the log about refused requests.
LOG_INTERVAL_S = 10.0
_KEY_HEADER = HEADER.lower().encode()
_WEBHOOKS = "/v1/webhooks/"
#: Asked by load balancers, which would take a refusal for a dead process; it costs nothing.
_FREE = frozenset({"/v1/healthz"})


#: Kind of limit → what an error calls the sender.
_SENDERS = {"key": "API key", "unproven": "address"}


@dataclass(slots=True)
class RequestLimit:
    """Tells how far a limit is used up, as far as this process knows."""

    kind: str
    #: Seconds that one request pays for, and the most seconds that may be paid ahead.
    every: float
    window: float
    #: Instant until which the requests so far pay.
    paid: float = 0.0
    #: Requests let through that Valkey has not been told of.
    unsettled: int = 0

    def charge(self, now: float) -> float:
        """Counts one request; returns 0, or the seconds until one is let through."""
        paid = max(self.paid, now) + self.every
        if (over := paid - now - self.window) > 0:
            return over
        self.paid = paid
        self.unsettled += 1
        return 0.0

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """Returns the RateLimit headers (draft-ietf-httpapi-ratelimit-headers-10)."""
        ahead = max(0.0, self.paid - now)
        remaining = max(0, int((self.window - ahead) / self.every))
        quota, name = self.window / self.every, self.kind.encode()
        return [
            (b"ratelimit-policy", b'"%b";q=%d;w=%d' % (name, quota, self.window)),
            (b"ratelimit", b'"%b";r=%d;t=%d' % (name, remaining, ahead + 0.999)),
        ]


@dataclass(eq=False, repr=False)
class RequestLimits:
    """The limits of this process."""

    client: Redis
    settings: Settings
    authenticator: Authenticator
    is_genuine: Callable[[str], bool]
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    #: Subjects, and webhooks, of which this process remembers what they used.
    max_remembered: int = MAX_REMEMBERED_LIMITS

    def __post_init__(self) -> None:
        self._rates = {
            "key": self.settings.limit_key,
            "user": self.settings.limit_user,
            "address": self.settings.limit_address,
            "unproven": self.settings.limit_key,
        }
        #: Digests of webhooks' tokens that were found, the one not used for longest first.
        self._webhooks: dict[str, None] = {}
        self._limits: dict[str, RequestLimit] = {}
        self._charged = asyncio.Event()
        #: Refused requests by kind of limit, since the last line in the log.
        self._refused: Counter[str] = Counter()
        self._log = structlog.get_logger()

    def charge_request(self, scope: Scope, headers: Mapping[bytes, bytes]) -> RequestLimit | None:
        """Counts a request for whoever sent it; the limit that is used up most, None where there is
        none.

        Raises `TooManyRequests`.
        """
        path: str = scope["path"]
        if path in _FREE:
            return None
        token = headers.get(_KEY_HEADER, b"").decode("latin-1")
        if not token and b"cookie" in headers:
            token = session_token(
                headers[b"cookie"].decode("latin-1"), https=scope["scheme"] == "https"
            )
        address = limited_address(scope)
        if not token and path.startswith(_WEBHOOKS):
            token = path.removeprefix(_WEBHOOKS).partition("/")[0]
            # Charged for each sender: anyone who found a token cannot shut out its owner.
            if _digest(token) in self._webhooks:
                return self.charge("key", f"{_digest(token)}:{address}")
            is_webhook = not token.startswith(API_KEY_PREFIX) and self.is_genuine(token)
            return self.charge("unproven" if is_webhook else "address", address)
        known = self.authenticator.found_before(token) if token else None
        if known is not None and known.sources and not is_within(_peer(scope), known.sources):
            # Whoever stole it does not use up its owner's limit.
            return self.charge("address", address)
        if known is not None:
            limit = self.charge("key", known.key_id)
            if known.user_id is None:
                return limit
            of_user = self.charge("user", known.user_id)
            return limit if of_user is None or (limit and limit.paid > of_user.paid) else of_user
        is_key = token.startswith(API_KEY_PREFIX) and self.is_genuine(token)
        return self.charge("unproven" if is_key else "address", address)

    def note_webhook(self, token: str, *, is_known: bool) -> None:
        """Remember that PostgreSQL knows a webhook's token, or forget it."""
        digest = _digest(token)
        self._webhooks.pop(digest, None)
        if is_known:
            self._webhooks[digest] = None
            if len(self._webhooks) > self.max_remembered:
                self._webhooks.pop(next(iter(self._webhooks)))

    def charge(
        self, kind: str, subject: str, rate: float | None = None, window: float = BURST_WINDOW_S
    ) -> RequestLimit | None:
        """Counts one of `rate` requests a second (None: as the settings say; 0: without a limit).

        Raises `TooManyRequests`.
        """
        rate = self._rates[kind] if rate is None else rate
        if not rate:
            return None
        name, now = f"{kind}:{subject}", self.clock()
        limit = self._limits.get(name)
        if limit is None:
            if (
                len(self._limits) >= self.max_remembered
            ):  # Valkey remembers; those it was not told of stay
                self._limits = {
                    other: kept for other, kept in self._limits.items() if kept.unsettled
                }
            limit = self._limits[name] = RequestLimit(kind, 1 / rate, window)
        if wait := limit.charge(now):
            self._refused[kind] += 1
            LIMITED.labels(kind).inc()
            self._charged.set()
            error = TooManyRequests(
                f"This {_SENDERS.get(kind, kind)} has sent more than {rate:g} requests per second. "
                "Retry later.",
                retry_after=wait,
            )
            error.headers = limit.headers(now)
            raise error
        self._charged.set()
        return limit

    def headers_of(self, limit: RequestLimit) -> list[tuple[bytes, bytes]]:
        return limit.headers(self.clock())

    async def run(self) -> None:
        """Settles with Valkey for ever."""
        logged = 0.0
        while True:
            await self._charged.wait()
            self._charged.clear()
            await asyncio.sleep(SETTLE_INTERVAL_S)
            try:
                await self.settle()
            except RedisError:  # until it is back, the limits hold in each process
                pass
            except Exception:  # the boundary of a loop
                self._log.exception("limits_not_settled")
            if self._refused and self.clock() - logged > LOG_INTERVAL_S:
                self._log.warning("requests_refused", **self._refused)
                self._refused.clear()
                logged = self.clock()

    async def settle(self) -> None:
        """Tells Valkey what was let through, and takes over how far the limits are used up."""
        charged = [(name, limit) for name, limit in self._limits.items() if limit.unsettled]
        for start in range(0, len(charged), MAX_LIMITS_PER_SETTLEMENT):
            part = charged[start : start + MAX_LIMITS_PER_SETTLEMENT]
            counts = [limit.unsettled for _, limit in part]
            args = [
                round(word)
                for (_, limit), count in zip(part, counts, strict=True)
                for word in (limit.every * 1e6, count, limit.window * 1e6)
            ]
            for (_, limit), count in zip(part, counts, strict=True):
                limit.unsettled -= count  # once: a reply that is lost must not count twice
            names = [keys.request_limit(name) for name, _ in part]
            delays = await valkey.run_script(self.client, scripts.SPEND_REQUESTS, names, args)
            now = self.clock()
            for (_, limit), ahead in zip(part, delays, strict=True):
                limit.paid = now + int(ahead) / 1e6 + limit.every * limit.unsettled


def _digest(token: str) -> str:
    return blake2b(token.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _peer(scope: Scope) -> str:
    return str((scope.get("client") or ("",))[0])


def limited_address(scope: Scope) -> str:
    """Return where a request comes from: of IPv6 the network, since one host has all of its
    addresses.

    Requests of which that is not known share one limit.
    """
    try:
        address = parse_address(_peer(scope))
    except ValueError:
        return UNKNOWN_SOURCE
    return str(
        address if address.version == 4 else ip_network((address, IPV6_NETWORK_BITS), strict=False)
    )
