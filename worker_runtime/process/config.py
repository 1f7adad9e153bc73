"""Reads the worker's configuration: one JSON `WorkerConfig`, from standard input or `container_launch`."""

from __future__ import annotations

import os

import msgspec

from worker_runtime.process import container_launch
from worker_runtime.process.shared_state import LEASE_MARGIN
from worker_runtime.process.valkey import BadValkeyAddress, ValkeyAddress
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.launch_document import BadLaunchDocument, BadLaunchKey

#: Bytes. A configuration has about 600.
_MAX_SIZE = 64 * 1024


class BadConfig(BerthError):
    """The worker's configuration cannot be used."""

    code = "BAD_CONFIG"


def parse_config(data: bytes) -> WorkerConfig:
    """Decodes and checks a configuration; raises `BadConfig` with the reason, never with a value."""
    try:
        config = msgspec.json.decode(data, type=WorkerConfig)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadConfig(f"standard input is no worker configuration: {error}") from None
    if not config.worker_id or not config.pool:
        raise BadConfig("worker_id and pool must not be empty")
    if len(config.orchestrator_key) != 32:
        raise BadConfig("orchestrator_key must be 32 bytes of Ed25519 public key")
    if not 0 < config.mark_period < config.mark_ttl - LEASE_MARGIN:
        raise BadConfig(f"mark_period must be less than mark_ttl - {LEASE_MARGIN:.0f} s")
    try:
        ValkeyAddress(config.valkey_url)
    except BadValkeyAddress as error:
        raise BadConfig(f"valkey_url: {error.detail}") from None
    return config


def read_config(descriptor: int = 0) -> WorkerConfig:
    """Reads the configuration to its end and leaves /dev/null in the descriptor's place."""
    if container_launch.has_launch_document(os.environ):
        return _read_container_config()
    data = read_document(descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, descriptor)
    os.close(null)
    return parse_config(data)


def read_document(descriptor: int = 0) -> bytes:
    """Reads a configuration to its end; raises `BadConfig` if it is too long."""
    data = b""
    while chunk := os.read(descriptor, _MAX_SIZE):
        data += chunk
        if len(data) > _MAX_SIZE:
            raise BadConfig(f"standard input is longer than {_MAX_SIZE} bytes")
    return data


def _read_container_config() -> WorkerConfig:
    try:
        config = parse_config(container_launch.read_launch_document(os.environ))
        task_id = container_launch.read_task_id(os.environ)
    except (BadLaunchDocument, BadLaunchKey) as error:
        raise BadConfig(error.detail) from None
    return msgspec.structs.replace(config, task_id=task_id or config.task_id)
