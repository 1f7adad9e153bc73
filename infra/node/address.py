"""The address of the node's socket: its path may have any length, and only one node serves it."""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from infra.node.protocol import NodeBusy, NodeSocketInvalid
from infra.processes import try_lock

#: Bytes that `sockaddr_un` holds, without the closing zero.
_MAX_PATH_BYTES = 107


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[str]:
    """Yields the path, short enough for a Unix socket while the block runs.

    A long path goes through its folder's descriptor, so that clones in deep folders work.
    """
    plain = str(path)
    if len(os.fsencode(plain)) <= _MAX_PATH_BYTES:
        yield plain
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def take_lock(path: Path) -> IO[bytes]:
    """Locks `path` until the file is closed or this process ends. Raises `NodeBusy`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    if not try_lock(file):
        file.close()
        raise NodeBusy(f"another node holds {path}; stop it first, or choose another path")
    return file


def listen(path: Path) -> socket.socket:
    """Opens a listening socket at `path` with mode 0600. The caller holds the lock of this path.

    It replaces the socket file of a killed node. Raises `NodeSocketInvalid`.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise NodeSocketInvalid(f"{path} exists and is no socket; it was left untouched")
        path.unlink()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    mask = os.umask(0o177)  # the file must never be open to others
    try:
        with reachable(path) as short:
            server.bind(short)
        server.listen(128)
    except OSError as error:
        server.close()
        raise NodeSocketInvalid(f"{path}: {error.strerror}") from None
    finally:
        os.umask(mask)
    return server
