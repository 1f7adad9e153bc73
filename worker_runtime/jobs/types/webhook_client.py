"""Sends one POST: a webhook to an address that a stranger
may have chosen, a message to its provider.

The name is resolved once, its addresses are checked, and the connection goes to one of those: a
name that points into our own network, now or a moment later, leads nowhere. Redirects are not
followed. One deadline bounds all of it, from the name's resolution to the answer's end.
"""

import http.client
import ipaddress
import ssl
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from worker_runtime.jobs.config import PostOutlet
from worker_runtime.jobs.protocol.messages import JobFailed
from worker_runtime.jobs.types.deadline import Address, TimeIsUp, connect, deadline, resolve
from worker_runtime.jobs.types.job_type import RetryLater

#: Seconds. A longer `Retry-After` of the receiver is ignored.
_MAX_RETRY_AFTER_S = 3600.0
#: Where hosts of the internet are (RFC 4291). Below and above are addresses that stand for
#: IPv4 ones: mapped, compatible, translated (RFC 2765, 6052, 8215); also private,
#: link-local and site-local ones.
_IPV6_UNICAST = ipaddress.ip_network("2000::/3")
#: Not for a host of the internet, though Python 3.11 calls them global.
_SPECIAL_NETWORKS = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # protocol assignments; 192.0.0.192 is the metadata of Oracle's cloud
            "168.63.129.16/32",  # Azure's own services, as a virtual machine reaches them
            "192.31.196.0/24",  # AS112, IPv4 and IPv6
            "192.175.48.0/24",
            "2620:4f:8000::/48",
            "192.52.193.0/24",  # AMT relays
            "192.88.99.0/24",  # 6to4 relays
            "2001::/23",  # protocol assignments, Teredo among them
            "2002::/16",  # 6to4
            "3fff::/20",  # documentation (RFC 9637)
        ),
    )
)
#: The middle of an ISATAP address, whose end is an IPv4
#: address (RFC 5214), with either "universal" bit.
_ISATAP_WORDS = (0x00005EFE, 0x02005EFE)


class AddressRefused(JobFailed, code="WEBHOOK_ADDRESS_REFUSED"):
    """Deliveries go to public addresses over https only."""


class CertificateRefused(JobFailed, code="WEBHOOK_CERTIFICATE_REFUSED"):
    """The receiver's certificate is not valid for its name."""


class ReceiverUnreachable(RetryLater, code="WEBHOOK_UNREACHABLE"):
    """The receiver could not be reached, or did not answer in time."""

    #: The connection was there: the receiver may have got the request.
    sent = False


@dataclass(frozen=True, slots=True)
class WebhookReply:
    """The status, the seconds of `Retry-After` (None:
    not asked for, or too long), the body's beginning."""

    status: int
    retry_after: float | None
    body: bytes = b""


class _PinnedConnection(http.client.HTTPConnection):
    """Connects to one of these addresses; with `context` over TLS, for the name in the URL."""

    def __init__(
        self, host: str, port: int, addresses: list[Address], context: ssl.SSLContext | None
    ) -> None:
        super().__init__(host, port)
        self._addresses = addresses
        self._context = context
        self.default_port = 80 if context is None else 443  # it is left out of the header `Host`

    def connect(self) -> None:
        self.sock = connect(self._addresses)
        if self._context is not None:
            secured = self._context.wrap_socket(
                self.sock, server_hostname=self.host, do_handshake_on_connect=False
            )
            self.sock = secured  # to be closed, whatever becomes of the handshake
            secured.do_handshake()


def send_post(
    url: str, body: bytes, headers: dict[str, str], outlet: PostOutlet, max_answer_bytes: int = 0
) -> WebhookReply:
    """Sends, and reads the head of the reply with up to `max_answer_bytes` bytes of its body.

    Raises `AddressRefused`, `CertificateRefused`, `ReceiverUnreachable`.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:
        raise AddressRefused("the URL cannot be read") from None
    if parts.scheme not in ("https", "http") or not host or "@" in parts.netloc:
        raise AddressRefused("an https URL with a host and without a user is needed")
    context = None
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=outlet.ca_file or None)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection: _PinnedConnection | None = None
    connected = False
    try:
        with deadline(outlet.timeout):
            addresses = _addresses(host, port, plain=parts.scheme == "http", outlet=outlet)
            connection = _PinnedConnection(host, port, addresses, context)
            connection.connect()
            connected = True
            connection.request("POST", path, body, headers)
            with connection.getresponse() as response:
                retry_after = _seconds(response.headers.get("Retry-After", ""))
                return WebhookReply(
                    response.status,
                    retry_after,
                    response.read(max_answer_bytes) if max_answer_bytes else b"",
                )
    except ssl.SSLCertVerificationError as error:
        raise CertificateRefused(error.verify_message) from None
    except (OSError, http.client.HTTPException, TimeIsUp) as error:
        slow = f"it took more than {outlet.timeout:g} s"
        unreachable = ReceiverUnreachable(
            slow if isinstance(error, TimeIsUp) else type(error).__name__
        )
        unreachable.sent = connected
        raise unreachable from None
    finally:
        if connection is not None:
            connection.close()


def _seconds(after: str) -> float | None:
    """Returns the seconds that a Retry-After header asks for. RFC 9110, 10.2.3: seconds, or a
    date."""
    try:
        if after.isascii() and after.isdigit():
            retry_after = float(after)
        else:
            retry_after = max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
    return retry_after if retry_after <= _MAX_RETRY_AFTER_S else None


def _addresses(host: str, port: int, *, plain: bool, outlet: PostOutlet) -> list[Address]:
    """Returns the addresses of the name to which deliveries may go."""
    try:
        addresses = resolve(host, port)
    except (OSError, UnicodeError) as error:
        raise ReceiverUnreachable(f"its name: {type(error).__name__}") from None
    allowed = [address for address in addresses if _is_allowed(address, plain=plain, outlet=outlet)]
    if not allowed:
        raise AddressRefused("plain http" if plain else "the address is not a public one")
    return allowed


def _is_allowed(address: Address, *, plain: bool, outlet: PostOutlet) -> bool:
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    if plain:
        return outlet.allow_private and ip.is_loopback
    return outlet.allow_private or _is_public(ip)


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and (
        address not in _IPV6_UNICAST or (int(address) >> 32) & 0xFFFF_FFFF in _ISATAP_WORDS
    ):
        return False
    special = any(address in network for network in _SPECIAL_NETWORKS)
    return address.is_global and not address.is_multicast and not special
