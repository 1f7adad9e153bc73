"""Finds out who sent a request that came through proxies of ours, and over which scheme.

A proxy says so in headers that anybody can send. They count only from a proxy that
`BERTH_TRUSTED_PROXIES` names, and only those of the kind that `BERTH_FORWARDED_HEADER` names:
`X-Forwarded-For` with `X-Forwarded-Proto` and `X-Forwarded-Host`, or `Forwarded` (RFC 7239). A
proxy writes one kind, and passes on the other as its client sent it.

Each proxy appends to what it received. So the headers are read from their end, and whatever a
client has written changes nothing of what a proxy wrote behind it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Literal

from starlette.types import Scope

from infra.networks import is_within, parse_address, parse_network

ForwardedHeader = Literal["X-Forwarded-For", "Forwarded"]
#: The source of a request whose proxy does not name it: `unknown`, an obfuscated name, or no
#: address at all. It is in no network, and all such requests share one limit: the text itself may
#: change with each of them.
UNKNOWN_SOURCE = "unknown"
#: Proxies between a client and us that are looked at. Their headers may have 64 KiB.
_MAX_HOPS = 16
#: Addresses for which it is remembered whether they are a proxy's:
#: to find it out takes 2 µs and more.
_MAX_REMEMBERED_PEERS = 1024
_SCHEMES = frozenset({"http", "https"})
#: Key of a request's scope: the host that its sender asked for, where a proxy of ours says so.
HOST = "berth.host"

#: `192.0.2.1:443`, `[2001:db8::1]`, `[2001:db8::1]:443`. RFC 7239 takes `_name` for a port, too.
_BEHIND_PORT = re.compile(r"(?:([0-9.]+):[\w.-]{1,64}|\[([^\]]+)\](?::[\w.-]{1,64})?)", re.ASCII)
#: A pair of `Forwarded`. Its value may also hold what
#: RFC 7239 wants quoted: some proxies do not quote IPv6.
_PAIR = re.compile(
    r'\s*([\w!#$%&\'*+.^`|~-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;,"]*))\s*(?:;|$)', re.ASCII
)


@dataclass(frozen=True, slots=True)
class _Hop:
    """Holds what a proxy wrote of the client that was connected to it."""

    source: str
    scheme: str = ""
    host: str = ""


class TrustedProxies:
    """The proxies in front of the API, and the kind of header that they write."""

    def __init__(
        self, proxies: Iterable[str] = (), header: ForwardedHeader = "X-Forwarded-For"
    ) -> None:
        networks = [parse_network(proxy) for proxy in proxies]
        self._any = bool(networks)
        self._read_hops = _read_forwarded if header == "Forwarded" else _read_x_forwarded
        self._is_proxy = lru_cache(_MAX_REMEMBERED_PEERS)(
            lambda address: is_within(address, networks)
        )

    def resolve(self, scope: Scope) -> None:
        """Replace the client of a request, its scheme and its host by what proxies of ours wrote.

        The client is the last address that is no proxy of ours:
        what is in front of it anybody may have sent.
        """
        peer = (scope.get("client") or ("",))[0]
        if not self._any or not self._is_proxy(peer):
            return
        hop = _Hop(peer)
        for hop in islice(self._read_hops(scope, peer), _MAX_HOPS):
            if not self._is_proxy(hop.source):
                break
        scope["client"] = (hop.source, 0)
        if hop.scheme in _SCHEMES:
            scope["scheme"] = hop.scheme
        if hop.host:
            scope[HOST] = hop.host


def parse_source(text: str) -> str:
    """Return the address that a proxy wrote, without its port;
    `UNKNOWN_SOURCE` for what is none."""
    text = text.strip().strip('"')
    if parts := _BEHIND_PORT.fullmatch(text):
        text = parts[1] or parts[2]
    try:
        return str(parse_address(text))
    except ValueError:
        return UNKNOWN_SOURCE


def _read_x_forwarded(scope: Scope, peer: str) -> Iterator[_Hop]:
    """Yields the hops, the nearest first. Most proxies set scheme and host once, and some append
    them, as the address."""
    schemes = list(islice(_elements(scope, b"x-forwarded-proto"), _MAX_HOPS)) or [""]
    hosts = list(islice(_elements(scope, b"x-forwarded-host"), _MAX_HOPS)) or [""]
    named = False
    for number, text in enumerate(_elements(scope, b"x-forwarded-for")):
        named = True
        scheme, host = schemes[min(number, len(schemes) - 1)], hosts[min(number, len(hosts) - 1)]
        yield _Hop(parse_source(text), scheme.lower(), host)
    if not named:
        yield _Hop(peer, schemes[0].lower(), hosts[0])


def _read_forwarded(scope: Scope, peer: str) -> Iterator[_Hop]:
    """Yields the hops, the nearest first."""
    for element in _elements(scope, b"forwarded"):
        pairs = _pairs_of(element)
        source = parse_source(pairs.get("for", UNKNOWN_SOURCE))
        yield _Hop(source, pairs.get("proto", "").lower(), pairs.get("host", ""))


def _elements(scope: Scope, header: bytes) -> Iterator[str]:
    """Yield the elements of a list header over all of its lines, the last one first."""
    for name, value in reversed(scope["headers"]):
        if name == header:
            yield from _split_from_end(value.decode("latin-1"))


def _split_from_end(line: str) -> Iterator[str]:
    """Yield the parts between commas that are not within quotes. A quote that a client left open
    takes in only what is in front of it."""
    end = len(line)
    quoted = False
    for position in range(end - 1, -1, -1):
        if line[position] == '"':
            quoted = not quoted
        elif line[position] == "," and not quoted:
            yield line[position + 1 : end].strip()
            end = position
    yield line[:end].strip()


def _pairs_of(element: str) -> Mapping[str, str]:
    """Return the pairs of an element of `Forwarded`
    with names in small letters; none if it is malformed.

    The same name twice is an error (RFC 7239, section 4):
    nobody knows which of both the proxy meant.
    """
    pairs: dict[str, str] = {}
    position = 0
    while position < len(element):
        pair = _PAIR.match(element, position)
        if pair is None or pair[1].lower() in pairs:
            return {}
        pairs[pair[1].lower()] = pair[3] if pair[2] is None else re.sub(r"\\(.)", r"\1", pair[2])
        position = pair.end()
    return pairs
