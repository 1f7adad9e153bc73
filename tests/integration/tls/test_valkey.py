"""Valkey behind TLS: the worker's own client, and a worker that does all it does through it."""

import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.jobs.view import JobInspector
from infra.local.servers import ValkeyServer
from infra.valkey.client import connect_valkey, reply_of
from tests.support.proxies.tls import TlsFront
from tests.support.workers.harness import WorkerHarness
from worker_runtime.process.valkey import (
    NOTHING,
    BadValkeyAddress,
    Valkey,
    ValkeyAddress,
    ValkeyRefused,
    ValkeyUnreachable,
)
from worker_runtime.protocol.messages import OrderState

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def front(valkey_server: ValkeyServer, tmp_path: Path) -> Iterator[TlsFront]:
    with TlsFront(valkey_server.port, tmp_path) as front:
        yield front


@pytest.fixture
def url(front: TlsFront) -> str:
    return f"rediss://localhost:{front.port}/0?ssl_ca_certs={front.authority}"


@pytest.fixture
def client(url: str) -> Iterator[Valkey]:
    client = Valkey(url)
    client.execute("FLUSHALL")
    yield client
    client.close()


def test_commands_and_large_values_pass(client: Valkey, front: TlsFront) -> None:
    large = b"x" * 1_000_000
    assert client.pipeline([("SET", "a", large), ("GET", "a"), ("PING",)]) == [
        b"OK",
        large,
        b"PONG",
    ]
    with pytest.raises(ValkeyRefused):
        client.execute("INCR", "a")
    assert front.secured == 1


def test_a_wait_ends_in_time_and_drops_the_connection(client: Valkey) -> None:
    client.send("BLPOP", "nobody", 5)
    began = time.monotonic()
    with pytest.raises(ValkeyUnreachable, match="no reply in time"):
        client.receive(0.3)
    assert 0.25 < time.monotonic() - began < 2.0
    assert not client.connected
    assert client.execute("PING") == b"PONG"


def test_a_selector_tells_when_a_reply_is_there(client: Valkey, url: str) -> None:
    client.send("BLPOP", "bell", 5)
    assert client.ready() is NOTHING  # TLS 1.3 has sent session tickets, and no reply
    other = Valkey(url)
    other.execute("LPUSH", "bell", "1")
    reply = NOTHING
    while reply is NOTHING:
        assert select.select([client.fileno()], [], [], 5.0)[0]
        reply = client.ready()
    assert reply == [b"bell", b"1"]
    assert client.execute("PING") == b"PONG"
    other.close()


def test_a_second_client_needs_no_name_and_checks_it_all_the_same(client: Valkey, url: str) -> None:
    beside = Valkey(url, beside=client)
    assert beside.execute("PING") == b"PONG"
    beside.close()


def test_a_cut_connection_is_unreachable_and_opened_again(client: Valkey, front: TlsFront) -> None:
    client.send("BLPOP", "nobody", 5)
    front.cut()
    with pytest.raises(ValkeyUnreachable):
        client.receive(5.0)
    assert client.execute("PING") == b"PONG"


def test_a_server_that_proves_nothing_is_refused(
    valkey_server: ValkeyServer, front: TlsFront, tmp_path: Path
) -> None:
    # The system's authorities.
    with pytest.raises(ValkeyUnreachable, match="SSLCertVerificationError"):
        Valkey(f"rediss://localhost:{front.port}").connect()
    folder = tmp_path / "other"
    folder.mkdir()
    with (
        TlsFront(valkey_server.port, folder, name="elsewhere.example") as other,
        pytest.raises(ValkeyUnreachable, match="SSLCertVerificationError"),
    ):
        Valkey(f"rediss://localhost:{other.port}?ssl_ca_certs={other.authority}").connect()
    with pytest.raises(ValkeyUnreachable, match="connecting"):  # a server without TLS
        Valkey(f"rediss://localhost:{valkey_server.port}?ssl_ca_certs={front.authority}").connect()


def test_an_address_names_authorities_that_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadValkeyAddress, match="cannot be read"):
        ValkeyAddress(f"rediss://h?ssl_ca_certs={tmp_path}/missing.pem")
    address = ValkeyAddress("rediss://u:p@cache.example:6380/2")
    assert (address.tls_name, address.target, address.database) == (
        "cache.example",
        ("cache.example", 6380),
        2,
    )


async def test_one_address_serves_our_clients_of_all_kinds(url: str, front: TlsFront) -> None:
    client = connect_valkey(url)
    assert await reply_of(client.ping())
    await client.aclose()
    with JobInspector(url) as jobs:
        assert not jobs.overview().runners
    assert front.secured == 2


def test_a_worker_is_claimed_trades_and_survives_a_cut(
    url: str, front: TlsFront, tmp_path: Path
) -> None:
    harness = WorkerHarness(url, tmp_path)
    harness.client.execute("FLUSHALL")
    try:
        worker = harness.active()
        for _ in range(2):
            outcome = harness.send().outcome
            assert outcome is not None
            assert outcome.state is OrderState.FILLED
            front.cut()
            harness.client.close()
        assert len(worker.placed()) == 2
        assert harness.mark() == f"1:{worker.worker_id}"
    finally:
        harness.close()
