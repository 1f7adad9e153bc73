"""A proxy in front of the dev server, which knows neither TLS nor API keys: it wants both.

It opens TLS with a certificate of its own authority, asks for a client certificate, and passes
bytes on. A connection whose first request lacks the API key gets `GetSystemInfo` and nothing else:
the real authorizer answers that call without a look at the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import inspect
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from infra.local.process import HOST

#: The API key that the proxy lets pass, made of letters in `_HUFFMAN` like every other that a test
#: sends.
API_KEY = "toasties"
#: HPACK's codes (RFC 7541, appendix B) of the letters in `Bearer toasties`: client libraries send
#: them so.
_HUFFMAN = {
    "a": "00011",
    "c": "00100",
    "e": "00101",
    "i": "00110",
    "o": "00111",
    "s": "01000",
    "t": "01001",
    "r": "101100",
    " ": "010100",
    "B": "1011101",
}
_HEADERS, _DATA = 1, 0
_END = 0x4 | 0x1  # END_HEADERS, END_STREAM
_PREFACE = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")


def _hpack(text: str) -> bytes:
    bits = "".join(_HUFFMAN[letter] for letter in text)
    bits += "1" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


#: An answer without a body: `:status: 200`, and gRPC's PERMISSION_DENIED in the server's own words.
_DENIED = b"\x88" + b"".join(
    _literal(name, value)
    for name, value in (
        (b"content-type", b"application/grpc"),
        (b"grpc-status", b"7"),
        (b"grpc-message", b"Request unauthorized."),
    )
)


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


class CertificateAuthority:
    """Issues certificates into files of `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._folder / f"{name}.pem"
        usage = dict.fromkeys(inspect.signature(x509.KeyUsage).parameters, False) | {
            "key_cert_sign": True
        }
        made = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(**usage), critical=True)
        )
        self.certificate.write_bytes(self._signed(made))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            # Python 3.13 wants what RFC 5280 (4.2.1) asks of certificates.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )

    def _signed(self, builder: x509.CertificateBuilder) -> bytes:
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str, *, names: tuple[str, ...] = ()) -> tuple[Path, Path]:
        """A certificate for `names` (127.0.0.1 too if there are any) and its key: two files."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = ExtendedKeyUsageOID.SERVER_AUTH if names else ExtendedKeyUsageOID.CLIENT_AUTH
        made = self._builder(subject, key.public_key()).add_extension(
            x509.ExtendedKeyUsage([usage]), critical=False
        )
        if names:
            alternatives = [x509.DNSName(host_name) for host_name in names]
            made = made.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        certificate, private = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certificate.write_bytes(self._signed(made))
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        private.chmod(0o600)
        return certificate, private


@dataclass
class TlsProxy:
    """Passes connections on to `backend` (`host:port`)."""

    backend: str
    port: int = 0
    #: Connections with the right API key.
    admitted: int = 0
    #: The API keys that count now.
    valid_keys: set[str] = field(default_factory=lambda: {API_KEY})
    #: Requests without one of them.
    refused: int = 0
    #: All keys that ever counted.
    _known_keys: set[str] = field(default_factory=lambda: {API_KEY})
    _served: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._served[task] = writer
        try:
            await self._pass_on(reader, writer)
        finally:
            del self._served[task]
            writer.close()

    def renew(self, api_key: str) -> None:
        """From now on this key counts, too."""
        self.valid_keys.add(api_key)
        self._known_keys.add(api_key)

    def expire(self, api_key: str) -> None:
        """From now on requests with this key are refused, on open connections, too."""
        self.valid_keys.remove(api_key)

    async def close(self) -> None:
        """Ends all connections."""
        for writer in self._served.values():
            writer.transport.abort()
        while self._served:
            await asyncio.wait(list(self._served))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.backend.rpartition(":")
        try:
            back, forth = await asyncio.open_connection(host, int(port))
        except OSError:
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._answers(back, writer))
                group.create_task(self._requests(reader, forth, writer))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            forth.close()

    async def _answers(self, back: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await back.read(65536):
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError  # ends the other direction

    async def _requests(
        self,
        reader: asyncio.StreamReader,
        forth: asyncio.StreamWriter,
        writer: asyncio.StreamWriter,
    ) -> None:
        forth.write(await reader.readexactly(_PREFACE))
        # A client sends its key in full once, and then by a number of the connection's own.
        key, has_refused = "", False
        is_first = True
        while True:
            head = await reader.readexactly(9)
            body = await reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, stream = head[3], int.from_bytes(head[5:], "big")
            if kind == _HEADERS:
                shown = self._shown_key(body)
                key = shown or key
                self.admitted += is_first and key in self.valid_keys
                is_first = False
                if shown in self.valid_keys and has_refused:
                    raise ConnectionResetError  # the client has a new key: it connects anew
                if stream > 1 and (has_refused or key not in self.valid_keys):
                    # The server behind has not seen this head: nothing of this connection is
                    # passed on any more.
                    has_refused = True
                    self.refused += 1
                    writer.write(_frame(_HEADERS, _END, stream, _DENIED))
            if stream > 1 and has_refused:
                continue
            forth.write(head + body)
            await forth.drain()

    def _shown_key(self, head: bytes) -> str:
        return next((key for key in self._known_keys if _hpack(f"Bearer {key}") in head), "")


@contextlib.asynccontextmanager
async def tls_proxy(
    backend: str, authority: CertificateAuthority, server: tuple[Path, Path]
) -> AsyncIterator[TlsProxy]:
    """Serves with the certificate `server`, to those who show one that `authority` has issued."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*server)
    context.load_verify_locations(authority.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    proxy = TlsProxy(backend)
    listener = await asyncio.start_server(proxy.serve, HOST, 0, ssl=context)
    proxy.port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listener.close()
        await proxy.close()
