"""One shared connection: replies go to whom they belong, and none is waited for in vain."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import PrivateFormat
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

from infra.local.servers import ValkeyServer
from infra.valkey import client as valkey
from infra.valkey.link import ValkeyLink
from infra.valkey.request_queue import RequestQueue
from tests.support.message_signing import SECRETS
from worker_runtime.protocol import keys
from worker_runtime.protocol.requests import QueryAccount
from worker_runtime.protocol.scripts import ENQUEUE


@dataclass
class ScriptedServer:
    """Answers `HELLO`, and everything else only as the test says."""

    #: What came after the greeting.
    got: bytearray = field(default_factory=bytearray)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        with closing(writer):
            await reader.read(1000)
            writer.write(b"%0\r\n")
            while data := await reader.read(1000):
                self.got += data
                self.asked.set()

    def say(self, data: bytes) -> None:
        assert self.writer is not None
        self.writer.write(data)

    def hang_up(self) -> None:
        assert self.writer is not None
        self.writer.close()


@asynccontextmanager
async def scripted(timeout: float = 30.0) -> AsyncIterator[tuple[ScriptedServer, ValkeyLink]]:
    script = ScriptedServer()
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        valkey.connect_valkey(f"redis://127.0.0.1:{port}", socket_timeout=timeout) as client,
    ):
        link = await ValkeyLink.connect(client, lambda channel, data: None)
        yield script, link
        link.close()
        await link.lost


def certificate(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """Of localhost, signed by itself, and a server's context with it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    secret = key.private_bytes(encoding, PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "both.pem").write_bytes(made.public_bytes(encoding) + secret)
    (folder / "public.pem").write_bytes(made.public_bytes(encoding))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "both.pem")
    return folder / "public.pem", context


async def test_tls_is_checked_as_the_client_does(tmp_path: Path) -> None:
    public, context = certificate(tmp_path)
    server = await asyncio.start_server(ScriptedServer().serve, "localhost", 0, ssl=context)
    url = f"rediss://localhost:{server.sockets[0].getsockname()[1]}"
    async with (
        server,
        valkey.connect_valkey(f"{url}?ssl_ca_certs={public}") as client,
        valkey.connect_valkey(url) as other,
    ):
        made = await ValkeyLink.connect(client, lambda channel, data: None)
        made.close()
        await made.lost
        with pytest.raises(ssl.SSLCertVerificationError):
            await ValkeyLink.connect(other, lambda channel, data: None)


@pytest.fixture
async def link(valkey_client: Redis) -> AsyncIterator[ValkeyLink]:
    made = await ValkeyLink.connect(valkey_client, lambda channel, data: None)
    yield made
    made.close()


async def test_many_calls_at_once_have_their_own_replies(link: ValkeyLink) -> None:
    replies = await asyncio.gather(*(link.execute("ECHO", str(number)) for number in range(500)))
    assert replies == [str(number).encode() for number in range(500)]


async def test_no_other_call_gets_the_reply_of_a_cancelled_call(link: ValkeyLink) -> None:
    calls = [asyncio.create_task(link.execute("ECHO", str(number))) for number in range(3)]
    await asyncio.sleep(0)  # all are sent
    calls[0].cancel()
    calls[1].cancel()
    assert await calls[2] == b"2"
    assert await link.execute("ECHO", "after") == b"after"
    assert calls[0].cancelled()


async def test_an_error_is_raised_and_the_connection_continues(link: ValkeyLink) -> None:
    with pytest.raises(ResponseError, match="unknown command"):
        await link.execute("NONSENSE")
    assert await link.execute("PING") == b"PONG"


async def test_a_script_that_the_server_does_not_know_is_sent_to_it(
    link: ValkeyLink, valkey_client: Redis
) -> None:
    await valkey_client.script_flush()
    for new in (1, 0):
        reply = await link.run(
            ENQUEUE, ["{u}:seen", "{u}:queue", "{u}:bell", "{u}:mark"], ["r", "x", 9000, 9, "mac"]
        )
        assert reply[0] == new


async def test_messages_arrive_from_the_subscription_on_and_between_replies(
    valkey_client: Redis,
) -> None:
    told: list[tuple[bytes, bytes]] = []
    made = await ValkeyLink.connect(valkey_client, lambda *message: told.append(message))
    made.subscribe("channel")
    await made.execute("PING")
    for number in range(50):
        await asyncio.gather(
            made.execute("PUBLISH", "channel", f"own {number}"),
            valkey_client.publish("channel", "other"),
        )
    await made.execute("PING")  # what came before its reply has been told
    assert {channel for channel, _ in told} == {b"channel"}
    got = [data for _, data in told]
    assert [data for data in got if data != b"other"] == [
        f"own {number}".encode() for number in range(50)
    ]
    assert len(got) == 100
    made.unsubscribe("channel")
    await made.execute("PUBLISH", "channel", "too late")
    assert len(told) == 100
    made.close()


async def test_a_login_and_a_database_are_those_of_the_client(short_directory: Path) -> None:
    server = ValkeyServer(short_directory, durable=False)
    server.start()
    try:
        async with valkey.connect_valkey(server.url) as client:
            rights = ("on", ">p@ss", "~*", "&*", "+@all")
            await client.execute_command("ACL", "SETUSER", "ann", *rights)  # type: ignore[no-untyped-call]
            await client.config_set("requirepass", "secret")
        for login in (":secret", "ann:p%40ss"):
            url = f"redis://{login}@127.0.0.1:{server.port}/3"
            async with valkey.connect_valkey(url) as client:
                made = await ValkeyLink.connect(client, lambda channel, data: None)
                await made.execute("SET", "key", login)
                assert await client.get("key") == login.encode()
                made.close()
        async with valkey.connect_valkey(f"redis://:wrong@127.0.0.1:{server.port}") as client:
            with pytest.raises(ResponseError, match="WRONGPASS"):
                await ValkeyLink.connect(client, lambda channel, data: None)
    finally:
        server.stop()


async def test_a_late_reply_fails_its_call_and_drops_the_connection(short_directory: Path) -> None:
    server = ValkeyServer(short_directory, durable=False)
    server.start()
    try:
        async with valkey.connect_valkey(server.url, socket_timeout=0.2) as client:
            made = await ValkeyLink.connect(client, lambda channel, data: None)
            os.kill(server.pid, signal.SIGSTOP)
            try:
                with pytest.raises(TimeoutError):
                    await made.execute("PING")
            finally:
                os.kill(server.pid, signal.SIGCONT)
            assert isinstance(await made.lost, TimeoutError)
            with pytest.raises(ConnectionError):
                await made.execute("PING")
    finally:
        server.stop()


async def test_each_reply_has_its_whole_time() -> None:
    async with scripted(timeout=0.4) as (server, made):
        await asyncio.sleep(0.3)  # the greeting's time is nearly over
        call = asyncio.create_task(made.execute("SLOW"))
        await asyncio.sleep(0.25)
        server.say(b"+late\r\n")
        assert await call == b"late"
        with pytest.raises(TimeoutError):
            await made.execute("NEVER")


async def test_a_lost_connection_fails_all_that_wait_and_says_so() -> None:
    async with scripted() as (server, made):
        calls = [asyncio.create_task(made.execute("SET", "k", "v")) for _ in range(3)]
        await server.asked.wait()
        server.say(b"+OK\r\n")
        server.hang_up()
        replies = await asyncio.gather(*calls, return_exceptions=True)
        assert replies[0] == b"OK"
        assert [type(reply) for reply in replies[1:]] == [ConnectionError, ConnectionError]
        assert isinstance(await made.lost, ConnectionError)
        assert bytes(server.got).count(b"SET") == 3  # nothing was sent twice


@pytest.mark.parametrize("nonsense", [b"?\r\n", b"+a reply that nobody asked for\r\n"])
async def test_a_server_that_speaks_nonsense_is_left(nonsense: bytes) -> None:
    async with scripted() as (server, made):
        server.say(nonsense)
        assert isinstance(await asyncio.wait_for(made.lost, 10), RedisError)


@pytest.mark.parametrize(
    "reply", ["READONLY You can't write", "LOADING the dataset", "MASTERDOWN Link"]
)
async def test_a_server_that_cannot_do_its_work_is_left(reply: str) -> None:
    async with scripted() as (server, link):
        call = asyncio.ensure_future(link.execute("SET", "k", "v"))
        await server.asked.wait()
        server.say(f"-{reply}\r\n".encode())
        with pytest.raises(ResponseError, match=reply):
            await call
        assert link.lost.done()


async def test_a_reply_in_pieces_is_put_together() -> None:
    async with scripted() as (server, made):
        call = asyncio.create_task(made.execute("GET", "k"))
        await server.asked.wait()
        for piece in (b"$1", b"0\r\n01234", b"56789\r", b"\n"):
            server.say(piece)
            await asyncio.sleep(0.01)
        assert await call == b"0123456789"


async def test_a_clock_that_was_read_while_this_process_stood_still_is_read_again() -> None:
    async with scripted() as (server, made):
        reading = asyncio.create_task(made.read_clock())
        await server.asked.wait()
        server.asked.clear()
        server.say(b"*2\r\n$4\r\n1000\r\n$1\r\n0\r\n")
        time.sleep(0.3)  # noqa: ASYNC251 - the reply is there, and nobody reads it
        await server.asked.wait()
        server.say(b"*2\r\n$4\r\n1000\r\n$6\r\n300000\r\n")
        await reading
        assert 1_000_300 <= made.server_ms() < 1_000_900


async def test_a_queue_with_a_link_enqueues_over_it_alone(
    link: ValkeyLink, valkey_client: Redis
) -> None:
    queue = RequestQueue(valkey_client, SECRETS, lambda: link)
    first, second = (
        QueryAccount(request_id=number, user_id="u", account_id="a", reply_to="", generation="g")
        for number in ("1", "2")
    )
    await link.read_clock()
    assert (await queue.enqueue(first, time.monotonic() + 30.0)).new
    assert not (await queue.enqueue(first, time.monotonic() + 30.0)).new
    link.close()
    with pytest.raises(RedisError):
        await queue.enqueue(second, time.monotonic() + 30.0)
    assert await valkey_client.llen(keys.requests("u")) == 1  # nothing went another way
    assert (
        await RequestQueue(valkey_client, SECRETS, lambda: None).enqueue(
            second, time.monotonic() + 30.0
        )
    ).new
