"""Sends one POST to an address that a stranger may have chosen.

The name is resolved once, the address is checked, and the connection goes to that address: a name that points
into our own network, now or a moment later, leads nowhere. Redirects are not followed.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from worker_runtime.jobs.config import WebhookOutlet
from worker_runtime.jobs.protocol.messages import JobFailed
from worker_runtime.jobs.types.job_type import RetryLater

#: Addresses that stand for others, which the checks below would miss (RFC 4291, 6052, 8215).
_TRANSLATED = (
    ipaddress.ip_network("64:ff9b::/96"),
    ipaddress.ip_network("64:ff9b:1::/48"),
    ipaddress.ip_network("::/96"),
)


class AddressRefused(JobFailed):
    """Deliveries go to public addresses over https only."""

    code = "WEBHOOK_ADDRESS_REFUSED"


class CertificateRefused(JobFailed):
    """The receiver's certificate is not valid for its name."""

    code = "WEBHOOK_CERTIFICATE_REFUSED"


class ReceiverUnreachable(RetryLater):
    """The receiver could not be reached, or did not answer in time."""

    code = "WEBHOOK_UNREACHABLE"


@dataclass(frozen=True, slots=True)
class WebhookReply:
    """The status, and the seconds of `Retry-After` if there were any."""

    status: int
    retry_after: float | None


class _PinnedConnection(http.client.HTTPConnection):
    """Connects to one address; with `context` over TLS, for the name in the URL."""

    def __init__(
        self, host: str, port: int, target: tuple[str, int], context: ssl.SSLContext | None, timeout: float
    ) -> None:
        super().__init__(host, port, timeout=timeout)
        self._target = target
        self._context = context

    def connect(self) -> None:
        link = socket.create_connection(self._target, timeout=self.timeout)
        self.sock = link
        if self._context is not None:
            self.sock = self._context.wrap_socket(link, server_hostname=self.host)


def post_webhook(url: str, body: bytes, headers: dict[str, str], outlet: WebhookOutlet) -> WebhookReply:
    """Sends and reads the head of the reply. Raises `AddressRefused`, `CertificateRefused`,
    `ReceiverUnreachable`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:
        raise AddressRefused("the URL cannot be read") from None
    if parts.scheme not in ("https", "http") or not host or "@" in parts.netloc:
        raise AddressRefused("an https URL with a host and without a user is needed")
    target = _target(host, port, plain=parts.scheme == "http", outlet=outlet)
    context = None
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=outlet.ca_file or None)
    connection = _PinnedConnection(host, port, target, context, outlet.timeout)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        after = response.headers.get("Retry-After", "")
        return WebhookReply(response.status, float(after) if after.isascii() and after.isdigit() else None)
    except ssl.SSLCertVerificationError as error:
        raise CertificateRefused(error.verify_message) from None
    except (OSError, http.client.HTTPException) as error:
        raise ReceiverUnreachable(type(error).__name__) from None
    finally:
        connection.close()


def _target(host: str, port: int, *, plain: bool, outlet: WebhookOutlet) -> tuple[str, int]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ReceiverUnreachable(f"its name: {type(error).__name__}") from None
    for *_, target in found:
        address = ipaddress.ip_address(str(target[0]).partition("%")[0])
        if plain:
            fits = outlet.allow_private and address.is_loopback
        else:
            fits = outlet.allow_private or _is_public(address)
        if fits:
            return str(target[0]), port
    raise AddressRefused("plain http" if plain else "the address is not a public one")


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and (
        address.sixtofour is not None
        or address.teredo is not None
        or address.is_site_local  # fec0::/10, once for private networks, counts as global
        or any(address in network for network in _TRANSLATED)
    ):
        return False
    return address.is_global and not address.is_multicast
