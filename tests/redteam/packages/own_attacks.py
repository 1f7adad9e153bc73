"""What a hostile job tries: a module as an application would have it, for `test_own_jobs.py`."""

from __future__ import annotations

import ctypes
import glob
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from berth_jobs import context, job


def attempt(results: dict[str, Any], name: str, action: Callable[[], Any]) -> None:
    """Notes what an attack has got; nothing if the system refused it."""
    try:
        got = action()
    except (OSError, ValueError, PermissionError) as error:
        results.setdefault("refused", []).append(f"{name}: {type(error).__name__}")
        return
    if got:
        results[name] = got


def memory_of(pid: int, patterns: list[bytes]) -> list[str]:
    """What in a process's memory fits one of the patterns."""
    seen = set()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            area, rights = line.split()[:2]
            if not rights.startswith("r") or "[v" in line:
                continue
            first, last = (int(part, 16) for part in area.split("-"))
            try:
                memory.seek(first)
                data = memory.read(last - first) or b""
            except (OSError, ValueError, OverflowError):
                continue
            seen |= {match for pattern in patterns for match in re.findall(pattern, data)}
    return sorted(match.decode() for match in seen)


def readable_text(path: str, patterns: list[bytes]) -> list[str]:
    data = Path(path).read_bytes()
    return [match.decode() for pattern in patterns for match in re.findall(pattern, data)]


def ptrace(pid: int) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, pid, None, None) != 0:  # PTRACE_ATTACH
        raise OSError(ctypes.get_errno(), "ptrace")
    return "attached"


def signalled(pid: int) -> str:
    os.kill(pid, 0)
    return "it could be signalled"


def every_process() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def spy(patterns: list[bytes], files: list[str]) -> dict[str, Any]:
    """Tries all processes and these files; returns what it got."""
    results: dict[str, Any] = {}
    for pid in every_process():
        if pid == os.getpid():
            continue
        attempt(results, f"memory {pid}", partial(memory_of, pid, patterns))
        for part in ("environ", "cmdline"):
            attempt(
                results, f"{part} {pid}", partial(readable_text, f"/proc/{pid}/{part}", patterns)
            )
        attempt(results, f"descriptors {pid}", partial(os.listdir, f"/proc/{pid}/fd"))
        if pid > 2:
            attempt(results, f"ptrace {pid}", partial(ptrace, pid))
            attempt(results, f"signal {pid}", partial(signalled, pid))
    for path in files:
        attempt(results, f"file {path}", lambda: Path(path).read_bytes()[:64].hex())  # noqa: B023
    return results


@job(memory=2 << 30)
def attack(patterns: list[str], files: list[str], valkey_port: int) -> dict[str, Any]:
    """Looks for keys, other jobs' arguments and logins, wherever a process can look."""
    sought = [each.encode() for each in patterns]
    # PR_SET_DUMPABLE: it may read its own memory, and what it has inherited.
    ctypes.CDLL(None).prctl(4, 1)
    results = spy(sought, files)
    results["can read itself"] = memory_of(os.getpid(), [b"a-mar[k]-of-its-ow[n]"])
    own_part = "environ"
    attempt(results, "own memory", partial(memory_of, os.getpid(), sought))
    attempt(results, "own environment", partial(readable_text, f"/proc/self/{own_part}", sought))
    results["descriptors"] = sorted(
        os.readlink(path) for path in glob.glob("/proc/self/fd/*") if os.path.lexists(path)
    )
    results["environment"] = sorted(os.environ)
    results["secrets"] = dict(context().secrets)
    with socket.create_connection(("127.0.0.1", valkey_port), timeout=2) as link:
        link.sendall(b"KEYS *\r\n")
        results["valkey"] = link.recv(200).decode()
    attempt(results, "become root", partial(become, 0))
    results["user"] = os.getuid()
    results["users of its processes"] = [
        os.stat("/proc/self").st_uid,
        os.stat(f"/proc/{os.getppid()}").st_uid,
    ]
    return results


MARK = "-".join(["a", "mark", "of", "its", "own"])


def become(uid: int) -> str:
    os.setuid(uid)
    return "root"


@job
def hold(secret_argument: str, until: str) -> int:
    """Another job with an argument that nobody else may see."""
    while not os.path.exists(until):
        time.sleep(0.01)
    return len(secret_argument)


@job(secrets=["STRIPE_KEY"])
def hold_secret(until: str) -> int:
    while not os.path.exists(until):
        time.sleep(0.01)
    return len(context().secrets["STRIPE_KEY"])


@job(retry_on=(), max_attempts=1)
def lie_to_the_runner() -> None:
    """Writes packets of its own on the socket to the runner."""
    for path in glob.glob("/proc/self/fd/*"):
        try:
            link = socket.socket(fileno=os.dup(int(path.rpartition("/")[2])))
            link.send(b'{"type":"outcome","fence":1,"value":1}')
            link.send(b"\xff\x00 nonsense")
        except OSError:
            continue


@job
def kill_everything() -> list[int]:
    """Signals all processes that it can."""
    killed = []
    for pid in every_process():
        if pid not in (1, os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            except OSError:
                continue
    return killed


@job
def leave_cgroup(folders: list[str]) -> list[str]:
    """Moves itself into these cgroups, changes their limits, and makes others below them."""
    got = []
    for folder in folders:
        for name, text in (
            ("cgroup.procs", str(os.getpid())),
            ("tasks", str(os.getpid())),
            ("memory.limit_in_bytes", "-1"),
            ("memory.max", "max"),
            ("own/cgroup.procs", str(os.getpid())),
        ):
            path = Path(folder, name)
            try:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
                got.append(str(path))
            except OSError:
                continue
    return got
