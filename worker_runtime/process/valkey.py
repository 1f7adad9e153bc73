"""A small synchronous Valkey client on hiredis, for the worker's processes.

With redis-py an idle worker needs 50.8 MiB PSS, with this client 25.1 (14.9 with ten workers). It
never repeats a command, because a repeated write could be done twice: callers repeat what carries
an id. After any failure it drops the connection, on which the next reply could belong to an earlier
command; the next call connects again.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

import hiredis

from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.scripts import Script
from worker_runtime.protocol.sockets import watch_peer

if TYPE_CHECKING:
    import ssl

Argument = str | bytes | int | float
Command = tuple[Argument, ...]

#: The value that `ready` returns when no complete reply has arrived.
NOTHING = object()
#: Bytes of one read from the connection.
_CHUNK_BYTES = 65536
#: Seconds that the resolution of a host name may take:
#: three name servers, asked twice for a second each.
LOOKUP_TIMEOUT_S = 6.0
#: Seconds without traffic after which a checked connection is asked before it is used, and within
#: which it has to answer: a round trip takes 0.05 ms.
IDLE_BEFORE_CHECK_S, CHECK_TIMEOUT_S = 1.0, 0.5
_RUN_ID_PREFIX = b"run_id:"
#: Error replies after a failover, or while the server starts.
_UNABLE_ERRORS = ("READONLY", "LOADING", "MASTERDOWN")
# The stubs of hiredis say a tuple of one; it takes any number.
_pack = cast(Callable[[Command], bytes], hiredis.pack_command)


class ValkeyFailed(BerthError, code="VALKEY_FAILED", retryable=True):
    """A command of Valkey did not succeed."""


class ValkeyUnreachable(ValkeyFailed, code="VALKEY_UNREACHABLE"):
    """Valkey could not be reached, or did not answer in time."""


class ValkeyRefused(ValkeyFailed, code="VALKEY_REFUSED"):
    """Valkey answered a command with an error: it is loading, out of memory, read-only."""


class BadValkeyAddress(BerthError, code="BAD_ADDRESS"):
    """The address of Valkey cannot be used."""


class ValkeyAddress:
    """The address of Valkey: `redis://[user:password@]host:port/db` or
    `unix://[user:password@]path?db=0`.

    `rediss://` is TLS: the server has to prove the host's name, to the authorities in the file
    `?ssl_ca_certs=` (without it: the system's). redis-py reads the same addresses.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.username = unquote(parts.username or "")
        self.password = unquote(parts.password or "")
        if parts.scheme == "unix":
            self.target: str | tuple[str, int] = unquote(parts.path)
            database = parse_qs(parts.query).get("db", ["0"])[0]
        elif parts.scheme in ("redis", "rediss"):
            self.target = (parts.hostname or "127.0.0.1", parts.port or 6379)
            database = parts.path.strip("/") or "0"
        else:
            raise BadValkeyAddress(f"scheme {parts.scheme!r}; known are redis, rediss and unix")
        if not database.isdigit():
            raise BadValkeyAddress("the database is a number")
        self.database = int(database)
        #: The name that the server has to prove; empty: no TLS.
        self.tls_name = (parts.hostname or "127.0.0.1") if parts.scheme == "rediss" else ""
        self.authorities = parse_qs(parts.query).get("ssl_ca_certs", [""])[0]
        if self.authorities and not os.access(self.authorities, os.R_OK):
            raise BadValkeyAddress(f"the authorities in {self.authorities} cannot be read")

    def greeting(self) -> list[Command]:
        """Returns the first commands of a new connection."""
        commands: list[Command] = []
        if self.password:
            user = (self.username,) if self.username else ()
            commands.append(("AUTH", *user, self.password))
        if self.database:
            commands.append(("SELECT", self.database))
        return commands


@cache
def _tls_context(authorities: str) -> ssl.SSLContext:
    import ssl  # 2 MiB, which a worker without TLS does not need

    return ssl.create_default_context(cafile=authorities or None)


class TlsLink:
    """A TLS connection with what `Valkey` needs of a socket.

    Not with the kernel's timeouts, after which OpenSSL
    would keep waiting: each call sets Python's.
    """

    def __init__(self, link: socket.socket, address: ValkeyAddress) -> None:
        """Takes `link` over; its timeout holds for the handshake, too. Raises OSError, of which
        every `ssl.SSLError` is one."""
        import ssl

        self._unfinished = (TimeoutError, ssl.SSLWantReadError)
        tls = _tls_context(address.authorities).wrap_socket(link, server_hostname=address.tls_name)
        self._link, self.close, self.fileno, self.getpeername = (
            tls,
            tls.close,
            tls.fileno,
            tls.getpeername,
        )
        #: Timeouts in seconds, by socket option.
        self.patiences: dict[int, float] = {}

    def _wait(self, option: int) -> None:
        seconds = self.patiences[option]
        self._link.settimeout(max(seconds, 1e-6) if seconds < math.inf else None)

    def send(self, data: memoryview) -> int:
        self._wait(socket.SO_SNDTIMEO)
        return self._link.send(data)

    def recv(self, size: int, flags: int) -> bytes:
        """Receives up to `size` bytes; `flags` is MSG_DONTWAIT or 0. Raises BlockingIOError, like a
        socket."""
        if flags:
            self._link.settimeout(0.0)
        else:
            self._wait(socket.SO_RCVTIMEO)
        try:
            return self._link.recv(size)
        except self._unfinished:
            raise BlockingIOError from None


class Valkey:
    """A connection, opened when it is first needed. Not for use by several threads. Times in
    seconds."""

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float = 1.0,
        timeout: float = 2.0,
        limit: Callable[[], float] = lambda: math.inf,
        busy: Callable[[float], AbstractContextManager[object]] = nullcontext,
        beside: Valkey | None = None,
        checked: bool = False,
    ) -> None:
        """Calls `limit` before each wait: no wait takes longer than it says, whatever the timeouts.

        `checked`: after a second without traffic the connection is asked before it is used, and
        replaced if it has died silently.

        Only the resolution of a host name can: `busy` surrounds it with the seconds that it may
        take. `beside`, a client of the same server, saves it while connected.
        """
        self._limit = limit
        self._busy = busy
        self._beside = beside
        self._checked = checked
        #: Instant of the last receipt on `time.monotonic`.
        self._received_at = 0.0
        self._address = ValkeyAddress(url)
        self._connect_timeout = connect_timeout
        self.timeout = timeout
        self._socket: socket.socket | TlsLink | None = None
        #: Present timeouts in seconds, by socket option.
        self._patiences: dict[int, float] = {}
        self._server: str | None = None
        #: The server cannot serve us now:
        #: the next command takes another connection, perhaps to another one.
        self._unable = False
        self._reader = hiredis.Reader(notEnoughData=NOTHING)

    @property
    def connected(self) -> bool:
        return self._socket is not None

    def fileno(self) -> int:
        """Returns the open connection's descriptor, for a selector."""
        if self._socket is None:
            raise ValkeyUnreachable("not connected")
        return self._socket.fileno()

    def _target(self) -> str | tuple[str, int]:
        target = self._address.target
        link = None if self._beside is None else self._beside._socket
        if link is None or isinstance(target, str):
            return target
        host, port = link.getpeername()[:2]
        return host, port

    def connect(self) -> None:
        """Opens the connection if there is none; raises `ValkeyUnreachable`."""
        if self._unable:
            self.close()
        if self._socket is not None:
            return
        try:
            target = self._target()
            if isinstance(target, str):
                link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket = link
                link.settimeout(min(self._connect_timeout, self._limit()))
                link.connect(target)
            else:
                wait = min(self._connect_timeout, self._limit())
                with self._busy(2 * wait + LOOKUP_TIMEOUT_S):
                    link = socket.create_connection(target, timeout=wait)
                    self._socket = link
                    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    watch_peer(link)
                    if self._address.tls_name:
                        self._socket = TlsLink(link, self._address)
        except OSError as error:
            self.close()
            raise ValkeyUnreachable(f"connecting: {type(error).__name__}") from None
        if self._socket is link:
            link.settimeout(None)  # from here on the kernel's: `_patience`
        self._patiences.clear()
        self._reader = hiredis.Reader(notEnoughData=NOTHING)
        self._server = None
        self._received_at = time.monotonic()
        greeting = self._address.greeting()
        if greeting:
            for reply in self.pipeline(greeting):
                if isinstance(reply, hiredis.ReplyError):
                    self.close()
                    raise ValkeyUnreachable("the server refused the login or the database")

    def close(self) -> None:
        link, self._socket, self._unable = self._socket, None, False
        if link is not None:
            link.close()

    def send(self, *command: Argument) -> None:
        """Sends one command and does not wait for its reply."""
        self._send([command])

    def receive(self, timeout: float | None = None) -> Any:
        """Waits for one reply. Returns an error reply instead of raising it."""
        reply = self._parse()
        if reply is not NOTHING:  # it came together with the one before
            return reply
        wait = min(self.timeout if timeout is None else timeout, self._limit())
        until = time.monotonic() + wait
        while reply is NOTHING:
            self._fill(wait)
            wait = until - time.monotonic()
            reply = self._parse()
        return reply

    def ready(self) -> Any:
        """Returns a reply that has arrived, else `NOTHING`. Call it when the descriptor is
        readable."""
        reply = self._parse()
        if reply is NOTHING:
            self._fill(0.0)
            reply = self._parse()
        return reply

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Sends all and returns all replies; error replies are in the list as
        `hiredis.ReplyError`."""
        self._send(commands)
        return [self.receive() for _ in commands]

    def execute(self, *command: Argument) -> Any:
        """Executes one command and returns its reply; raises `ValkeyRefused` for an error reply."""
        self.send(*command)
        return raise_if_error(self.receive())

    def run(self, script: Script, key_names: Sequence[str], args: Sequence[Argument]) -> Any:
        """Runs one script; sends its source only to a server that does not know it."""
        self.send(*evalsha(script, key_names, args))
        reply = self.receive()
        if is_unknown_script(reply):  # refused before anything ran, so this is no retry
            self.send("EVAL", script.source, len(key_names), *key_names, *args)
            reply = self.receive()
        return raise_if_error(reply)

    def server(self) -> str:
        """Returns the run id of the connected server, asked once for each connection: a server that
        is restarted or replaced breaks them all. Raises `ValkeyFailed`."""
        self.connect()
        if self._server is None:
            lines: list[bytes] = self.execute("INFO", "server").split()
            run_id_line = next(
                (line for line in lines if line.startswith(_RUN_ID_PREFIX)), _RUN_ID_PREFIX
            )
            self._server = run_id_line[len(_RUN_ID_PREFIX) :].decode()
        return self._server

    def _replace_if_dead(self) -> None:
        """Closes a connection that was silent for a while and does not answer now."""
        if self._socket is None or time.monotonic() - self._received_at <= IDLE_BEFORE_CHECK_S:
            return
        timeout, self.timeout = self.timeout, min(self.timeout, CHECK_TIMEOUT_S)
        self._received_at = time.monotonic()  # the question itself is not asked about
        try:
            self.execute("PING")
        except ValkeyFailed:
            self.close()
        finally:
            self.timeout = timeout

    def _send(self, commands: Sequence[Command]) -> None:
        if self._checked:
            self._replace_if_dead()
        self.connect()
        link = self._socket
        if link is None:
            raise ValkeyUnreachable("not connected")
        data = b"".join(map(_pack, commands))
        try:
            wait = min(self.timeout, self._limit())
            until, rest = time.monotonic() + wait, memoryview(data)
            while rest:  # once, unless the server is slow to take it
                self._patience(socket.SO_SNDTIMEO, wait)
                rest = rest[link.send(rest) :]
                wait = until - time.monotonic()
        except OSError as error:
            self.close()
            raise ValkeyUnreachable(f"sending: {type(error).__name__}") from None

    def _patience(self, option: int, seconds: float) -> None:
        """Sets how many seconds the kernel waits in one call, to send or to receive.

        Python's own timeouts cost two more system calls for each send and receipt (4 of the 11 for
        a job). This costs one, and only when the timeout changes.
        """
        if isinstance(self._socket, TlsLink):
            self._socket.patiences[option] = seconds
        elif self._socket is not None and self._patiences.get(option) != seconds:
            # 0 means without a limit.
            micros = max(1, math.ceil(seconds * 1_000_000)) if seconds < math.inf else 0
            self._socket.setsockopt(
                socket.SOL_SOCKET, option, struct.pack("ll", *divmod(micros, 1_000_000))
            )
            self._patiences[option] = seconds

    def _parse(self) -> Any:
        try:
            reply = self._reader.gets()
            self._unable |= isinstance(reply, hiredis.ReplyError) and str(reply).startswith(
                _UNABLE_ERRORS
            )
            return reply
        except hiredis.ProtocolError:
            self.close()
            raise ValkeyUnreachable("the reply is no RESP") from None

    def _fill(self, wait: float) -> None:
        link = self._socket
        if link is None:
            raise ValkeyUnreachable("not connected")
        try:
            if wait > 0.0:
                self._patience(socket.SO_RCVTIMEO, wait)
            data = link.recv(_CHUNK_BYTES, 0 if wait > 0.0 else socket.MSG_DONTWAIT)
        except BlockingIOError:
            if wait == 0.0:  # a false alarm of the selector
                return
            self.close()
            raise ValkeyUnreachable("no reply in time") from None
        except OSError as error:
            self.close()
            raise ValkeyUnreachable(f"receiving: {type(error).__name__}") from None
        if not data:
            self.close()
            raise ValkeyUnreachable("the server closed the connection")
        self._received_at = time.monotonic()
        self._reader.feed(data)


def evalsha(script: Script, key_names: Sequence[str], args: Sequence[Argument]) -> Command:
    return ("EVALSHA", script.sha, len(key_names), *key_names, *args)


def is_unknown_script(reply: object) -> bool:
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT")


def raise_if_error(reply: Any) -> Any:
    """Returns the reply; raises `ValkeyRefused` if it is an error."""
    if isinstance(reply, hiredis.ReplyError):
        # The text of an error names the command's class
        # and may quote arguments: keep its code alone.
        raise ValkeyRefused(str(reply).split(" ", 1)[0])
    return reply
