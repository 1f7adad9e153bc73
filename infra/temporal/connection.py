"""How every process of ours reaches Temporal: address, TLS, client certificate and API key from the
settings.

What is wrong with them is told in one sentence, when a process connects.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client, Interceptor
from temporalio.runtime import PrometheusConfig, Runtime, TelemetryConfig
from temporalio.service import RPCError, RPCStatusCode, TLSConfig

from infra.settings import Settings
from infra.temporal.checked_service import KEEP_ALIVE, CheckedConnections
from infra.temporal.client import RPC_TIMEOUT, PausedQueries, TemporalUnavailable
from infra.temporal.codec import data_converter
from infra.vault import key_file
from worker_runtime.protocol.errors import BerthError

#: Seconds between two tries to reach Temporal at start.
RETRY_INTERVAL_S = 0.5
#: Seconds between two looks at the file of the API key.
KEY_CHECK_INTERVAL_S = 10.0

_DENIED = {RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNAUTHENTICATED}

log = structlog.get_logger()


class TemporalRefused(TemporalUnavailable, code="TEMPORAL_REFUSED", retryable=False):
    """The settings do not fit this Temporal server."""


class TemporalSettingsInvalid(BerthError, code="TEMPORAL_SETTINGS_INVALID"):
    """The settings of the connection to Temporal contradict each other."""


def tls_config(settings: Settings) -> TLSConfig | bool:
    """Returns the TLS configuration, False without TLS. Raises `TemporalSettingsInvalid`,
    `KeyFileMissing` or `KeyFileExposed`."""
    certificate, private = settings.temporal_cert_file, settings.temporal_cert_key_file
    if not settings.temporal_tls:
        for name in ("ca_file", "server_name", "cert_file", "cert_key_file"):
            if getattr(settings, f"temporal_{name}"):
                raise TemporalSettingsInvalid(
                    f"BERTH_TEMPORAL_{name.upper()} is set and BERTH_TEMPORAL_TLS is not"
                )
        return False
    if bool(certificate) != bool(private):
        raise TemporalSettingsInvalid(
            "BERTH_TEMPORAL_CERT_FILE and BERTH_TEMPORAL_CERT_KEY_FILE are set together, or neither"
        )
    return TLSConfig(
        server_root_ca_cert=_read(
            settings.temporal_ca_file, "BERTH_TEMPORAL_CA_FILE", private=False
        ),
        domain=settings.temporal_server_name or None,
        client_cert=_read(certificate, "BERTH_TEMPORAL_CERT_FILE", private=False),
        client_private_key=_read(private, "BERTH_TEMPORAL_CERT_KEY_FILE", private=True),
    )


def _read(path: str, setting: str, *, private: bool) -> bytes | None:
    if not path:
        return None
    return key_file.read_key_file(Path(path), private=private, made_by=f"{setting} names it")


def read_api_key(settings: Settings) -> str | None:
    """Raises `KeyFileMissing`, `KeyFileExposed`, or `TemporalSettingsInvalid` for what is no
    key."""
    data = _read(settings.temporal_api_key_file, "BERTH_TEMPORAL_API_KEY_FILE", private=True)
    if data is None:
        return None
    key = data.decode("ascii", "replace").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise TemporalSettingsInvalid(f"{settings.temporal_api_key_file} holds no API key")
    return key


async def open_client(
    settings: Settings, interceptors: Sequence[Interceptor] = (), **options: Any
) -> Client:
    """Opens a client with these settings; `options` are `Client.connect`'s own.

    Raises what `tls_config`, `read_api_key` and `data_converter` do, and `TemporalUnavailable`
    unless it is a lazy one.
    """
    tls, api_key = tls_config(settings), read_api_key(settings)
    try:
        return await Client.connect(
            settings.temporal_address,
            namespace=settings.temporal_namespace,
            tls=tls,
            api_key=api_key,
            data_converter=data_converter(settings),
            keep_alive_config=KEEP_ALIVE,
            plugins=[CheckedConnections()],
            interceptors=[PausedQueries(), *interceptors],
            **options,
        )
    except (RuntimeError, RPCError) as error:
        raise _reason(error, settings) from None


async def check_client(client: Client, settings: Settings) -> None:
    """Raises `TemporalRefused` or `TemporalUnavailable`, each with one sentence on what is wrong.

    It asks for the namespace: a server with an authorizer answers all clients what connecting asks.
    """
    try:
        await client.workflow_service.describe_namespace(
            DescribeNamespaceRequest(namespace=settings.temporal_namespace), timeout=RPC_TIMEOUT
        )
    except (RuntimeError, RPCError) as error:
        raise _reason(error, settings) from None


def _reason(error: RuntimeError | RPCError, settings: Settings) -> TemporalUnavailable:
    """Says what is wrong, in one sentence. The SDK has the cause in a text only."""
    there, text = f"Temporal at {settings.temporal_address}", str(error)
    if (isinstance(error, RPCError) and error.status in _DENIED) or "PermissionDenied" in text:
        key = settings.temporal_api_key_file
        return TemporalRefused(
            f"{there} refuses the API key in {key}"
            if key
            else f"{there} wants an API key: BERTH_TEMPORAL_API_KEY_FILE names its file"
        )
    if isinstance(error, RPCError) and error.status == RPCStatusCode.NOT_FOUND:
        return TemporalRefused(f"{there} has no namespace {settings.temporal_namespace}")
    if "UnknownIssuer" in text or "BadEncoding" in text:
        authority = settings.temporal_ca_file or "the system's authorities"
        return TemporalRefused(f"{there} shows a certificate that {authority} did not issue")
    if "NotValidForName" in text:
        return TemporalRefused(
            f"{there} shows a certificate for another name: BERTH_TEMPORAL_SERVER_NAME says "
            "which to expect"
        )
    if "InvalidCertificate" in text:
        return TemporalRefused(f"{there} shows a certificate that is not valid: {text[-120:]}")
    if "InvalidMessage" in text:
        return TemporalRefused(f"{there} does not speak TLS, and BERTH_TEMPORAL_TLS is on")
    if any(
        word in text
        for word in ("PrivateKey", "CertificateParse", "NoCertificates", "InconsistentKeys")
    ):
        return TemporalRefused("BERTH_TEMPORAL_CERT_FILE and its key are not a pair of PEM files")
    # TLS 1.3 lets a client believe that it is connected; the server ends the connection a moment
    # later.
    if "error after connection" in text and settings.temporal_tls:
        which = settings.temporal_cert_file or "none is set"
        return TemporalRefused(
            f"{there} hangs up: it seems not to accept our client certificate ({which})"
        )
    if "error after connection" in text:
        return TemporalRefused(f"{there} hangs up: if it wants TLS, set BERTH_TEMPORAL_TLS")
    if "ConnectionRefused" in text:
        text = "connection refused"
    return TemporalUnavailable(f"{there} cannot be reached: {text[:200]}")


def _exporter(address: str) -> PrometheusConfig | None:
    """Lets the SDK show its metrics on the port after ours."""
    host, _, port = address.rpartition(":")
    if not address:
        return None
    return PrometheusConfig(
        f"{host}:{int(port) + 1}", counters_total_suffix=True, durations_as_seconds=True
    )


async def connect_orchestrator(
    settings: Settings, interceptors: Sequence[Interceptor] = ()
) -> Client:
    """Connects the orchestrator's client. Tries until Temporal answers: it may start later, or be
    away for a while.

    Raises what `tls_config` and `read_api_key` do.
    """
    try:
        runtime = Runtime(telemetry=TelemetryConfig(metrics=_exporter(settings.metrics_address)))
    except (RuntimeError, ValueError) as error:  # without metrics it works as well
        address = f"the port after {settings.metrics_address}"
        log.error("metrics_unavailable", address=address, reason=str(error)[:200])
        runtime = Runtime(telemetry=TelemetryConfig())
    logged = ""
    if not settings.temporal_codec_key_file:
        log.warning("temporal_histories_in_clear", setting="BERTH_TEMPORAL_CODEC_KEY_FILE")
    while True:
        try:
            client = await open_client(settings, runtime=runtime, interceptors=interceptors)
            await check_client(client, settings)
            return client
        except TemporalUnavailable as error:
            logged = _log_once(error, logged)
            await asyncio.sleep(RETRY_INTERVAL_S)


def _log_once(error: TemporalUnavailable, logged: str) -> str:
    """Logs the error unless it was the last one that was `logged`; returns what was logged."""
    if error.detail != logged and isinstance(error, TemporalRefused):
        log.error("temporal_refused", reason=error.detail)
    elif error.detail != logged:
        log.warning("temporal_not_reachable", reason=error.detail)
    return error.detail


async def watch_connection(
    client: Client, settings: Settings, period: float = KEY_CHECK_INTERVAL_S
) -> None:
    """Logs once why Temporal does not serve us, and takes over a new API key, in a background loop.

    It checks every `period` seconds.
    """
    logged = ""
    while True:
        try:
            await check_client(client, settings)
            logged = ""
        except TemporalUnavailable as error:
            logged = _log_once(error, logged)
        await asyncio.sleep(period)
        try:
            new = read_api_key(settings)
        except (BerthError, OSError) as error:
            log.error("temporal_api_key_not_read", reason=str(error))
            continue
        if new != client.api_key:
            client.api_key = new
            log.info("temporal_api_key_replaced")
