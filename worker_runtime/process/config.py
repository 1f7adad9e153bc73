"""Reads the worker's configuration: one JSON `WorkerConfig`, from standard input or the
environment.

A container without standard input, as on ECS, has it encrypted in the environment; the launch key
is a file that the host mounts (ADR 0012). ECS tells the container its task's id, which is known
only when the task exists.
https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-metadata-endpoint-v4.html
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from worker_runtime.process.shared_state import LEASE_MARGIN_S
from worker_runtime.process.valkey import BadValkeyAddress, ValkeyAddress
from worker_runtime.protocol import launch_document
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.launch_document import BadLaunchDocument, BadLaunchKey

#: Bytes. A configuration has about 600.
_MAX_CONFIG_BYTES = 64 * 1024
#: The base of ECS's metadata for this container.
METADATA_VARIABLE = "ECS_CONTAINER_METADATA_URI_V4"
#: Path of the key unless the task definition names another.
DEFAULT_KEY_FILE = "/run/berth/launch-document.key"
#: Seconds for the task's id in all, for one try, and between two: the endpoint may start late.
TASK_ID_TIMEOUT_S, ATTEMPT_TIMEOUT_S, RETRY_INTERVAL_S = 10.0, 2.0, 0.2


class BadConfig(BerthError, code="BAD_CONFIG"):
    """The worker's configuration cannot be used."""


def parse_config(data: bytes) -> WorkerConfig:
    """Decodes and checks a configuration; raises `BadConfig` with the reason, never with a
    value."""
    try:
        config = msgspec.json.decode(data, type=WorkerConfig)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadConfig(f"standard input is no worker configuration: {error}") from None
    if not config.worker_id or not config.pool:
        raise BadConfig("worker_id and pool must not be empty")
    if not config.orchestrator_keys or any(len(key) != 32 for key in config.orchestrator_keys):
        raise BadConfig("orchestrator_keys must be Ed25519 public keys of 32 bytes")
    if not 0 < config.mark_period < config.mark_ttl - LEASE_MARGIN_S:
        raise BadConfig(f"mark_period must be less than mark_ttl - {LEASE_MARGIN_S:.0f} s")
    try:
        ValkeyAddress(config.valkey_url)
    except BadValkeyAddress as error:
        raise BadConfig(f"valkey_url: {error.detail}") from None
    return config


def read_config(descriptor: int = 0) -> WorkerConfig:
    """Reads the configuration to its end and leaves /dev/null in the descriptor's place."""
    if launch_document.DOCUMENT in os.environ:
        return _read_container_config()
    data = read_document(descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, descriptor)
    os.close(null)
    return parse_config(data)


def read_document(descriptor: int = 0) -> bytes:
    """Reads a configuration to its end; raises `BadConfig` if it is too long."""
    data = b""
    while chunk := os.read(descriptor, _MAX_CONFIG_BYTES):
        data += chunk
        if len(data) > _MAX_CONFIG_BYTES:
            raise BadConfig(f"standard input is longer than {_MAX_CONFIG_BYTES} bytes")
    return data


def _read_container_config() -> WorkerConfig:
    try:
        config = parse_config(read_launch_document(os.environ))
        task_id = read_task_id(os.environ)
    except (BadLaunchDocument, BadLaunchKey) as error:
        raise BadConfig(error.detail) from None
    return msgspec.structs.replace(config, task_id=task_id or config.task_id)


def read_launch_document(environment: Mapping[str, str]) -> bytes:
    """Returns the decrypted launch document. Raises `BadLaunchDocument` or `BadLaunchKey`, never
    with a value."""
    path = Path(environment.get(launch_document.KEY_FILE, DEFAULT_KEY_FILE))
    try:
        key = launch_document.key_from(path.read_bytes())
    except OSError as error:
        raise BadLaunchKey(f"no launch key at {path}: {error.strerror}") from None
    return launch_document.unseal(
        environment[launch_document.DOCUMENT],
        key,
        worker_id=environment.get(launch_document.WORKER, ""),
    )


def read_task_id(environment: Mapping[str, str], patience: float = TASK_ID_TIMEOUT_S) -> str:
    """Returns this task's id, as its launcher knows it; '' outside of ECS. Raises
    `BadLaunchDocument`."""
    base = environment.get(METADATA_VARIABLE, "")
    if not base:
        return ""
    deadline = time.monotonic() + patience
    while True:
        try:
            return _fetch_task_metadata(base)
        except (OSError, ValueError, KeyError) as error:
            if time.monotonic() > deadline:
                raise BadLaunchDocument(
                    f"ECS does not tell the task's id: {type(error).__name__}"
                ) from None
            time.sleep(RETRY_INTERVAL_S)


def _fetch_task_metadata(base: str) -> str:
    """Requests the task's metadata over a plain socket: `http.client` would cost each worker 6.5 MB
    (measured)."""
    url = urlsplit(base)
    with socket.create_connection(
        (url.hostname or "", url.port or 80), timeout=ATTEMPT_TIMEOUT_S
    ) as link:
        link.sendall(f"GET {url.path}/task HTTP/1.0\r\nHost: {url.hostname}\r\n\r\n".encode())
        answer = b""
        while chunk := link.recv(65536):
            answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.split(b" ", 2)[1:2] != [b"200"]:
        raise OSError("refused")
    return str(msgspec.json.decode(body)["TaskARN"]).rpartition("/")[2]
