"""The jobs of an application of the tests: a package as a user writes it. It imports `berth_jobs`
alone."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Annotated, Any

import msgspec
from berth_jobs import RetryLater, context, job

IMPORTED_IN = os.getpid()
KEPT: list[bytes] = []


class Line(msgspec.Struct):
    article: str
    pieces: Annotated[int, msgspec.Meta(ge=1)]


class Model:
    """A stand-in for a pydantic model: it has the methods by which one is recognised."""

    def __init__(self, code: str) -> None:
        self.code = code

    @classmethod
    def model_json_schema(cls, ref_template: str) -> dict[str, Any]:
        code = {"$ref": ref_template.format(model="Code")}
        return {
            "type": "object",
            "properties": {"code": code},
            "$defs": {"Code": {"type": "string"}},
        }

    @classmethod
    def model_validate(cls, value: dict[str, Any]) -> Model:
        if value.get("code") == "bad":
            raise ValueError("a bad code")
        return cls(value["code"])

    def model_dump(self, mode: str) -> dict[str, Any]:
        return {"code": self.code, "mode": mode}


@job
def total(lines: list[Line], factor: float = 1.0) -> float:
    """Adds up the pieces."""
    return sum(line.pieces for line in lines) * factor


@job(name="model")
def use_model(model: Model) -> Model:
    return Model(model.code.upper())


@job(timeout=77)
def describe() -> dict[str, Any]:
    running = context()
    running.logger.info("described")
    sys.stdout.write("to standard output")
    return {
        "attempt": running.attempt,
        "job_id": running.job_id,
        "type": running.type,
        "fence": running.fence,
        "remaining": running.remaining(),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "uid": os.getuid(),
        "imported_in": IMPORTED_IN,
        "secrets": dict(running.secrets),
        "environment": sorted(os.environ),
    }


@job(secrets=["STRIPE_KEY"])
def charge() -> dict[str, str]:
    return dict(context().secrets)


@job(queue="scheduler", priority=9)
def ordered(ledger: str, label: str) -> None:
    write(ledger, label)


@job
def queued(ledger: str, label: str) -> None:
    write(ledger, label)


@job(priority=8)
def urgent(ledger: str, label: str) -> None:
    write(ledger, label)


@job(queue="emails")
def mailed(ledger: str, label: str) -> None:
    write(ledger, label)


@job(max_attempts=3, backoff=[0.01, 0.02], retry_on=KeyError)
def flaky(fails: int, kind: str = "KeyError") -> int:
    attempt = context().attempt
    if attempt <= fails:
        raise {"KeyError": KeyError("again"), "ValueError": ValueError("never")}[kind]
    return attempt


@job(backoff=[0.1, 300], retry_on=KeyError)
def patient(ledger: str) -> None:
    write(ledger, f"{time.time():.3f}")
    raise KeyError("again")


@job(backoff=300)
def later(wait: float, as_timedelta: bool = False) -> int:
    if context().attempt == 1:
        pause = timedelta(seconds=wait) if as_timedelta else wait
        raise RetryLater("not yet", retry_after=pause)
    return context().attempt


@job(group="customer-{customer}")
def serve(ledger: str, customer: int, until: str = "") -> None:
    write(ledger, f"begin-{customer}")
    wait_for(until)
    write(ledger, f"end-{customer}")


@job(unique_for=600)
def once(number: int, until: str = "") -> int:
    wait_for(until)
    return number


@job(unique_for=0.3)
def once_for_a_moment(until: str = "") -> None:
    wait_for(until)


@job(on_failed="shop_jobs.note_failure")
def doomed(why: str, dies: bool = False) -> None:
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(why)


@job
def note_failure(
    job_id: str, type: str, code: str, detail: str, attempt: int, arguments: Any
) -> Any:
    return {"job_id": job_id, "type": type, "code": code, "detail": detail, "arguments": arguments}


@job(rate="20/s")
def paced(ledger: str) -> None:
    write(ledger, f"{time.time():.3f}")


@job(max_running=1, idempotent=True)
def alone(ledger: str, until: str = "") -> None:
    write(ledger, "begin")
    wait_for(until)
    write(ledger, "end")


@job(max_running_per_node=1)
def alone_on_node(ledger: str, until: str = "") -> None:
    write(ledger, "begin")
    wait_for(until)
    write(ledger, "end")


@job(timeout=0.3)
def hang() -> None:
    time.sleep(60)


@job(memory=64 * 1024 * 1024)
def grow(mebibytes: int, where: str = "here") -> int:
    code = f"x = bytearray(b'1') * ({mebibytes} << 20); import time; time.sleep(20)"
    command = [sys.executable, "-c", code]
    if where == "process":
        subprocess.run(command, check=True)
        return 0
    if where == "process of a thread":
        thread = threading.Thread(target=subprocess.run, args=(command,))
        thread.start()
        thread.join()
        return 0
    size = mebibytes << 20
    grown = mmap.mmap(-1, size) if where == "shared memory" else bytearray(size)
    for at in range(0, size, mmap.PAGESIZE):
        grown[at] = 1
    if mebibytes > 64:
        time.sleep(20)
    return len(grown)


@job(memory=64 * 1024 * 1024)
def leap(mebibytes: int, where: str = "here") -> int:
    """Takes memory in one jump, at the speed of C."""
    code = f"b'1' * ({mebibytes} << 20)"
    if where == "here":
        return len(b"1" * (mebibytes << 20))
    done = subprocess.run([sys.executable, "-c", code], check=where == "process")
    return done.returncode


@job(memory=256 * 1024 * 1024)
def leap_further(mebibytes: int, ledger: str = "", until: str = "") -> int:
    """May take more than `leap`, and keeps it in its process."""
    KEPT.append(b"1" * (mebibytes << 20))
    if ledger:
        write(ledger, f"{os.getpid()}")
    wait_for(until)
    return os.getpid()


@job(memory=32 * 1024 * 1024, concurrency=10, idempotent=True, backoff=0.05)
async def grow_among_others(ledger: str, mebibytes: int = 0) -> int:
    """Takes that much, and too long, in its first attempt."""
    attempt = context().attempt
    if attempt == 1:
        grown = bytearray(b"1") * (mebibytes << 20)
        write(ledger, f"{len(grown)}")
        await asyncio.sleep(20)
    return attempt


@job
def report(steps: int, until: str = "", fails: bool = False) -> None:
    for step in range(steps):
        context().progress({"step": step})
    wait_for(until)
    if fails:
        raise ValueError("after its last step")


@job(concurrency=10)
async def report_among_others(label: str, repeat: int = 1, until: str = "") -> None:
    context().progress(label * repeat)
    await asyncio.to_thread(wait_for, until)


@job(concurrency=10, timeout=5)
async def fetch(
    label: str, seconds: float = 0.0, fails: bool = False, exits: bool = False
) -> dict[str, Any]:
    sys.stdout.write(f"<{label}>")
    await asyncio.sleep(seconds)
    sys.stdout.write(f"</{label}>")
    if exits:
        os._exit(9)
    if fails:
        raise ConnectionError(label)
    return {"label": label, "pid": os.getpid(), "job_id": context().job_id}


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def make_unreadable(how: str) -> Any:
    """Fails, or returns, with what a packet cannot hold."""
    name = os.fsdecode(b"caf\xe9.txt")
    if how == "error":
        raise FileNotFoundError(2, "No such file", name)
    if how == "output":
        sys.stdout.write(name)
        raise ValueError("after its output")
    if how == "text":
        raise Mute
    if how == "long":
        sys.stdout.write("\0" * 16_384)
        return "x" * 65_000
    return {"result": {"name": name}, "no json": object(), "raw": msgspec.Raw(b"nonsense")}[how]


@job(max_attempts=2, backoff=0.01, retry_on=FileNotFoundError)
def unreadable(how: str) -> Any:
    return make_unreadable(how)


@job(max_attempts=2, backoff=0.01, retry_on=FileNotFoundError, concurrency=10)
async def unreadable_among_others(how: str, until: str = "") -> Any:
    await asyncio.to_thread(wait_for, until)
    return None if until else make_unreadable(how)


@job(concurrency=10)
async def hang_up(until: str = "") -> int:
    """Closes the process's socket to the runner, and lives on."""
    for descriptor in os.listdir("/proc/self/fd") if until else ():
        with contextlib.suppress(OSError):  # most are no sockets
            link = socket.socket(fileno=os.dup(int(descriptor)))
            if link.type == socket.SOCK_SEQPACKET:
                link.shutdown(socket.SHUT_RDWR)
            link.close()
    await asyncio.to_thread(wait_for, until)
    return os.getpid()


@job
async def fetch_one(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return os.getpid()


@job(idempotent=True, backoff=0.05)
def survive(ledger: str, until: str = "", kill: str = "") -> int:
    write(ledger, f"{context().job_id}:{context().attempt}")
    if kill and context().attempt == 1:
        os.kill({"child": os.getpid(), "server": os.getppid()}[kill], signal.SIGKILL)
    wait_for(until)
    return context().attempt


@job
def spend(ledger: str, until: str = "") -> None:
    """May not run twice."""
    write(ledger, context().job_id)
    wait_for(until)


@job
def leave_behind() -> int:
    """Starts a process in a session of its own, whose parent ends."""
    script = (
        "import subprocess; out = subprocess.DEVNULL;"
        "print(subprocess.Popen(['sleep', '300'], stdout=out, stderr=out, "
        "start_new_session=True).pid)"
    )
    started = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    return int(started.stdout)


@job
def huge(size: int) -> str:
    return "x" * size


def write(ledger: str, text: str) -> None:
    with open(ledger, "a") as file:
        file.write(text + "\n")


def wait_for(path: str) -> None:
    while path and not os.path.exists(path):
        time.sleep(0.005)
