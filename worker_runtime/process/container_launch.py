"""Reads the launch document of a container that has no standard input, as on ECS (ADR 0012).

It is encrypted in the environment; the launch key is a file that the host mounts. ECS tells the container its
task's id, which is known only when the task exists.
https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-metadata-endpoint-v4.html
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from worker_runtime.protocol import launch_document
from worker_runtime.protocol.launch_document import BadLaunchDocument, BadLaunchKey

#: The base of ECS's metadata for this container.
METADATA_VARIABLE = "ECS_CONTAINER_METADATA_URI_V4"
#: Path of the key unless the task definition names another.
DEFAULT_KEY_FILE = "/run/berth/launch.key"
#: Seconds for the task's id in all, for one try, and between two: the endpoint may start late.
PATIENCE, TRY, PAUSE = 10.0, 2.0, 0.2


def has_launch_document(environment: Mapping[str, str]) -> bool:
    return launch_document.DOCUMENT in environment


def read_launch_document(environment: Mapping[str, str]) -> bytes:
    """The decrypted document. Raises `BadLaunchDocument` or `BadLaunchKey`, never with a value."""
    path = Path(environment.get(launch_document.KEY_FILE, DEFAULT_KEY_FILE))
    try:
        key = launch_document.key_from(path.read_bytes())
    except OSError as error:
        raise BadLaunchKey(f"no launch key at {path}: {error.strerror}") from None
    return launch_document.unseal(
        environment[launch_document.DOCUMENT], key, worker_id=environment.get(launch_document.WORKER, "")
    )


def read_task_id(environment: Mapping[str, str], patience: float = PATIENCE) -> str:
    """This task's id, as its launcher knows it; '' outside of ECS. Raises `BadLaunchDocument`."""
    base = environment.get(METADATA_VARIABLE, "")
    if not base:
        return ""
    deadline = time.monotonic() + patience
    while True:
        try:
            return _fetch_task_metadata(base)
        except (OSError, ValueError, KeyError) as error:
            if time.monotonic() > deadline:
                raise BadLaunchDocument(f"ECS does not tell the task's id: {type(error).__name__}") from None
            time.sleep(PAUSE)


def _fetch_task_metadata(base: str) -> str:
    """One plain request over a socket: `http.client` would cost each worker 6.5 MB (measured)."""
    url = urlsplit(base)
    with socket.create_connection((url.hostname or "", url.port or 80), timeout=TRY) as link:
        link.sendall(f"GET {url.path}/task HTTP/1.0\r\nHost: {url.hostname}\r\n\r\n".encode())
        answer = b""
        while chunk := link.recv(65536):
            answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.split(b" ", 2)[1:2] != [b"200"]:
        raise OSError("refused")
    return str(msgspec.json.decode(body)["TaskARN"]).rpartition("/")[2]
