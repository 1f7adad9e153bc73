"""TLS, client certificates and API keys, against the dev server behind a proxy that wants all
three."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from api.workers.service import WorkerControl, connect_temporal
from infra.compose import health
from infra.local.process import free_port
from infra.local.servers import TemporalServer
from infra.settings import Settings
from infra.temporal import connection
from infra.temporal.client import TemporalUnavailable
from infra.temporal.connection import TemporalRefused, TemporalSettingsInvalid
from infra.vault.key_file import KeyFileExposed, KeyFileMissing
from tests.support.proxies.temporal_tls import API_KEY, CertificateAuthority, TlsProxy, tls_proxy

NAME = "temporal.test"


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path, "authority")


@pytest.fixture
async def proxy(
    authority: CertificateAuthority, temporal_server: TemporalServer
) -> AsyncIterator[TlsProxy]:
    async with tls_proxy(
        temporal_server.address, authority, authority.issue("server", names=(NAME,))
    ) as running_proxy:
        yield running_proxy


@pytest.fixture
def settings(proxy: TlsProxy, authority: CertificateAuthority, tmp_path: Path) -> Settings:
    """With everything that the proxy wants."""
    certificate, key = authority.issue("client")
    return Settings(
        temporal_address=proxy.address,
        temporal_tls=True,
        temporal_ca_file=str(authority.certificate),
        temporal_server_name=NAME,
        temporal_cert_file=str(certificate),
        temporal_cert_key_file=str(key),
        temporal_api_key_file=str(_key_file(tmp_path / "api.key", API_KEY)),
    )


def _key_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(f"{text}\n")
    path.chmod(mode)
    return path


async def _refusal(settings: Settings, **changes: object) -> str:
    changed = settings.model_copy(update=changes)
    with pytest.raises(TemporalUnavailable) as caught:
        await connection.check_client(await connection.open_client(changed), changed)
    assert isinstance(caught.value, TemporalRefused), caught.value.detail
    assert "\n" not in caught.value.detail
    return caught.value.detail.removeprefix(f"Temporal at {changed.temporal_address} ")


async def test_everyone_connects_with_certificate_name_and_api_key(
    proxy: TlsProxy, settings: Settings
) -> None:
    orchestrator = await connection.connect_orchestrator(settings)
    await connection.check_client(orchestrator, settings)
    api = await connect_temporal(settings)
    await connection.check_client(api, settings)
    await WorkerControl(api).check(1.0)
    assert proxy.admitted == 2
    assert not await health.is_polling(settings, "nobody-polls", "here")
    assert proxy.admitted == 3


async def test_a_wrong_authority_is_reported_in_one_sentence(
    settings: Settings, tmp_path: Path
) -> None:
    other = CertificateAuthority(tmp_path, "other").certificate
    told = f"shows a certificate that {other} did not issue"
    assert await _refusal(settings, temporal_ca_file=str(other)) == told
    told = "shows a certificate that the system's authorities did not issue"
    assert await _refusal(settings, temporal_ca_file="") == told


async def test_a_client_certificate_that_is_missing_or_of_others_is_reported(
    settings: Settings, tmp_path: Path
) -> None:
    without = await _refusal(settings, temporal_cert_file="", temporal_cert_key_file="")
    assert without == "hangs up: it seems not to accept our client certificate (none is set)"
    certificate, key = CertificateAuthority(tmp_path, "other").issue("stranger")
    strange = await _refusal(
        settings, temporal_cert_file=str(certificate), temporal_cert_key_file=str(key)
    )
    assert strange == f"hangs up: it seems not to accept our client certificate ({certificate})"
    certificate.write_text("no certificate")
    broken = await _refusal(
        settings, temporal_cert_file=str(certificate), temporal_cert_key_file=str(key)
    )
    assert "not a pair of PEM files" in broken


async def test_a_wrong_or_missing_api_key_is_reported(settings: Settings, tmp_path: Path) -> None:
    wrong = _key_file(tmp_path / "wrong.key", "octets")
    refused = await _refusal(settings, temporal_api_key_file=str(wrong))
    assert refused == f"refuses the API key in {wrong}"
    missing = await _refusal(settings, temporal_api_key_file="")
    assert missing == "wants an API key: BERTH_TEMPORAL_API_KEY_FILE names its file"


async def test_a_wrong_name_namespace_or_protocol_is_reported(
    settings: Settings, temporal_server: TemporalServer
) -> None:
    assert "BERTH_TEMPORAL_SERVER_NAME" in await _refusal(
        settings, temporal_server_name="elsewhere.test"
    )
    assert "BERTH_TEMPORAL_SERVER_NAME" in await _refusal(settings, temporal_server_name="")
    assert await _refusal(settings, temporal_namespace="nowhere") == "has no namespace nowhere"
    plain = await _refusal(settings, temporal_address=temporal_server.address)
    assert plain == "does not speak TLS, and BERTH_TEMPORAL_TLS is on"
    off = {
        f"temporal_{name}": "" for name in ("ca_file", "server_name", "cert_file", "cert_key_file")
    }
    assert "set BERTH_TEMPORAL_TLS" in await _refusal(settings, temporal_tls=False, **off)


async def test_an_address_without_a_server_is_no_refusal(settings: Settings) -> None:
    with pytest.raises(
        TemporalUnavailable, match="cannot be reached: connection refused"
    ) as caught:
        await connection.open_client(
            settings.model_copy(update={"temporal_address": f"127.0.0.1:{free_port()}"})
        )
    assert not isinstance(caught.value, TemporalRefused)


async def test_settings_that_contradict_each_other_are_refused(
    settings: Settings, tmp_path: Path
) -> None:
    for changes, told in (
        ({"temporal_tls": False}, "BERTH_TEMPORAL_CA_FILE is set and BERTH_TEMPORAL_TLS is not"),
        ({"temporal_cert_key_file": ""}, "set together, or neither"),
        ({"temporal_api_key_file": str(_key_file(tmp_path / "empty.key", ""))}, "holds no API key"),
    ):
        with pytest.raises(TemporalSettingsInvalid, match=told):
            await connection.open_client(settings.model_copy(update=changes))
    with pytest.raises(KeyFileMissing, match="BERTH_TEMPORAL_API_KEY_FILE names it"):
        await connection.open_client(
            settings.model_copy(update={"temporal_api_key_file": "/nowhere"})
        )
    exposed = _key_file(tmp_path / "exposed.key", API_KEY, mode=0o644)
    settings = settings.model_copy(update={"temporal_api_key_file": str(exposed)})
    with pytest.raises(KeyFileExposed, match="0600"):
        await connection.open_client(settings)


async def test_the_api_takes_over_a_new_key_without_a_restart(
    proxy: TlsProxy, settings: Settings
) -> None:
    path = Path(settings.temporal_api_key_file)
    _key_file(path, "octets")
    client = await connect_temporal(settings)

    async def until(event: str) -> None:
        while not any(line["event"] == event for line in logs):  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.01)

    with capture_logs() as logs:
        watching = asyncio.create_task(connection.watch_connection(client, settings, period=0.05))
        async with asyncio.timeout(20):
            await until("temporal_refused")
            _key_file(path, API_KEY)
            await until("temporal_api_key_replaced")
            while not proxy.admitted:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        watching.cancel()
    await connection.check_client(client, settings)
    told = [line["reason"] for line in logs if line["event"] == "temporal_refused"]
    assert len(told) == 1, "once, not with every look"
    assert path.name in told[0]
    assert API_KEY not in str(logs)


@workflow.defn
class Greeting:
    @workflow.run
    async def run(self) -> str:
        return "done"


async def test_who_polls_continues_through_two_renewals_of_its_key(
    proxy: TlsProxy, settings: Settings, temporal_server: TemporalServer
) -> None:
    """The proxy refuses a key that has ended, with each request. The dev server has no authorizer
    that verifies JWTs."""
    path = Path(settings.temporal_api_key_file)
    client = await connection.connect_orchestrator(settings)
    direct = await Client.connect(temporal_server.address)
    watching = asyncio.create_task(connection.watch_connection(client, settings, period=0.05))

    async def greet(name: str) -> None:
        result = await direct.execute_workflow(
            Greeting.run, id=f"greeting-{name}", task_queue="renewals"
        )
        assert result == "done"

    async def until_refused(than: int) -> None:
        while proxy.refused <= than:  # noqa: ASYNC110 - the proxy has no event
            await asyncio.sleep(0.01)

    async with Worker(
        client,
        task_queue="renewals",
        workflows=[Greeting],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        await greet("before")
        for old, new in ((API_KEY, "cassette"), ("cassette", "coasters")):
            proxy.renew(new)
            _key_file(path, new)
            while client.api_key != new:  # noqa: ASYNC110 - a client has no event
                await asyncio.sleep(0.01)
            await greet(f"{new}-and-{old}")
            proxy.expire(old)
            await connection.check_client(client, settings)
            await greet(new)
        assert not proxy.refused, "a key was used after its end"
        # A key that is renewed too late is refused, and then the new one counts.
        proxy.expire("coasters")
        await until_refused(0)
        proxy.renew("octets")
        _key_file(path, "octets")
        await greet("late")
    watching.cancel()
