"""Measures what Shioaji's SDK costs without a login: `python -m infra.lab.shioaji.cost [SESSIONS]`.

Forks processes that import the SDK and make its client, in a network of their own with
nothing but a loopback, so that nobody ever talks to the broker. Not measured, since it takes
a login: the contracts, the order cache, and the session's traffic. Prints JSON; times are
seconds, memory is MiB of PSS.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import socket
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: CLONE_NEWUSER, CLONE_NEWNET; SIOCSIFFLAGS, IFF_UP.
_NEW_USER, _NEW_NET, _SET_FLAGS, _UP = 0x10000000, 0x40000000, 0x8914, 0x1


def cut_off_network() -> None:
    """Leaves this process only a loopback of its own.
    Raises `OSError` where the kernel forbids it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NET) and libc.unshare(_NEW_USER | _NEW_NET):
        raise OSError(ctypes.get_errno(), "unshare")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))


def pss() -> float:
    """Returns the MiB of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _session(folder: str, report: int, go: int) -> None:
    """Runs a session process up to its login: reports its figures once all others have come as
    far."""
    os.environ.update(SJ_LOG_PATH=f"{folder}/log", SJ_HOME_PATH=folder, SJ_CONTRACTS_PATH=folder)
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    before = time.monotonic()
    import shioaji

    imported = time.monotonic()
    figures: dict[str, Any] = {"import_s": imported - before}
    os.write(report, b"i")
    os.read(go, 1)
    figures["imported_mib"] = pss()
    before = time.monotonic()
    client = shioaji.Shioaji(simulation=True)
    figures |= {"client_s": time.monotonic() - before, "threads": threads()}
    os.write(report, b"c")
    os.read(go, 1)
    figures["client_mib"] = pss()
    os.write(report, json.dumps(figures).encode())
    os.read(go, 1)
    del client
    os._exit(0)


def measure(count: int, *, imported_before: bool) -> dict[str, Any]:
    """Measures `count` sessions at the same time. With `imported_before`, the parent imports the
    SDK before it forks them."""
    folder = tempfile.mkdtemp(prefix="berth-sdk-")
    children = []
    try:
        if imported_before:
            import shioaji  # noqa: F401
        for _ in range(count):
            (reports, report), (waits, go) = os.pipe(), os.pipe()
            if (pid := os.fork()) == 0:
                _session(folder, report, waits)
            children.append((pid, reports, go))
        figures_of_all = []
        for _ in ("imported", "client made"):
            for _, reports, _ in children:
                os.read(reports, 1)
            for _, _, go in children:
                os.write(go, b"x")
        for _, reports, _ in children:
            figures_of_all.append(json.loads(os.read(reports, 4096)))
        for _, _, go in children:
            os.write(go, b"x")
    finally:
        for pid, reports, go in children:
            os.waitpid(pid, 0)
            os.close(reports)
            os.close(go)
        shutil.rmtree(folder, ignore_errors=True)
    middle = {
        name: round(statistics.median(figures[name] for figures in figures_of_all), 3)
        for name in figures_of_all[0]
    }
    return {"sessions": count, "imported_before_fork": imported_before, **middle}


def main() -> None:
    """Measures one session, and as many as the first argument says (30)."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    cut_off_network()
    alone = pss()
    result = {
        "python_mib": round(alone, 1),
        "runs": [
            _in_child(1, False),
            _in_child(count, False),
            _in_child(count, True),
        ],
    }
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


def _in_child(count: int, imported_before: bool) -> dict[str, Any]:
    """Measures in a process of its own, so that no run sees the SDK of the one before."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writer, json.dumps(measure(count, imported_before=imported_before)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        figures: dict[str, Any] = json.loads(answer.read())
    os.waitpid(pid, 0)
    return figures


if __name__ == "__main__":
    main()
