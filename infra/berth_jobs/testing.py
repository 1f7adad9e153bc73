"""Testing mode: tests code that enqueues jobs, without an API.

    with testing.record() as sent:
        place_order(cart)
    sent.assert_enqueued(send_receipt, order_id=7)

    with testing.run_inline():
        assert send.enqueue(resize_image, image_id=7).result() == "7.png"

Inside of these blocks every producer of the process sends to the block: blocking or for asyncio, in
any thread. Arguments and results travel as JSON, as they do in production, so an argument that JSON
cannot hold fails in the test. The fixtures `berth_jobs_recorded` and `berth_jobs_inline` are the
same for pytest.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec

from .api_calls import EnqueueOptions, JobFailure, JobRequest, JobSnapshot
from .connections import pop_fake, push_fake
from .context import JobContext, use_context
from .declaration import JobFunction, declared_jobs, encode_value
from .errors import BerthJobsError

#: Bytes of arguments and of a result, as in production.
MAX_ARGUMENTS_BYTES = MAX_RESULT_BYTES = 64 * 1024
#: Seconds until the deadline of a job whose type names no timeout.
DEFAULT_TIMEOUT_S = 180.0


class NotRun(BerthJobsError):
    """The test waits for a job that `record` does not run.
    Use `run_inline` where results matter."""


class _Body(msgspec.Struct, frozen=True):
    type: str
    args: dict[str, Any] = {}
    options: EnqueueOptions = EnqueueOptions()


class _BatchRequest(msgspec.Struct, frozen=True):
    jobs: list[msgspec.Raw]


class _Refusal(Exception):
    """Becomes an answer with problem details."""

    def __init__(self, status: int, code: str, detail: str, field_name: str = "") -> None:
        super().__init__(detail)
        problem: dict[str, Any] = {"code": code, "title": code, "detail": detail}
        if field_name:
            problem["errors"] = [{"loc": field_name.split("."), "msg": detail}]
        self.response = httpx.Response(status, content=msgspec.json.encode(problem))


@dataclass(kw_only=True)
class RecordedJob:
    """Describes a job that was enqueued in the block."""

    job_id: str
    #: With its application, such as `shop/resize_image`.
    type: str
    #: As JSON has them.
    args: dict[str, Any]
    options: EnqueueOptions
    #: The state in which it ended, or is now.
    snapshot: JobSnapshot
    _body: bytes = field(repr=False)

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.args.items())
        return f"{self.type}({arguments})"


class Recorder:
    """Keeps the jobs that were enqueued, and runs none."""

    def __init__(self) -> None:
        #: In the order in which they were enqueued; a repeat with the same id is not added again.
        self.jobs: list[RecordedJob] = []
        self._by_id: dict[str, RecordedJob] = {}
        self._lock = threading.Lock()

    def of(self, job: JobFunction[..., Any] | str) -> list[RecordedJob]:
        """Return the jobs of one type: a decorated function,
        or a name with or without its application."""
        return [recorded for recorded in self.jobs if _is_of_type(recorded.type, job)]

    def assert_enqueued(self, job: JobFunction[..., Any] | str, /, **args: Any) -> RecordedJob:
        """Return the first job of this type that has these arguments, among others perhaps.

        Raises `AssertionError`, which lists what was enqueued.
        """
        expected = msgspec.json.decode(encode_value(args))
        for recorded in self.of(job):
            if all(
                name in recorded.args and recorded.args[name] == expected[name] for name in expected
            ):
                return recorded
        name = job if isinstance(job, str) else job.type.name
        arguments = ", ".join(f"{key}={value!r}" for key, value in expected.items())
        enqueued = "".join(f"\n  {recorded}" for recorded in self.jobs) or " nothing"
        raise AssertionError(f"{name}({arguments}) was not enqueued; enqueued was:{enqueued}")

    def assert_nothing_enqueued(self, job: JobFunction[..., Any] | str | None = None) -> None:
        """Raise `AssertionError` if a job was enqueued; with `job`, one of this type."""
        recorded_jobs = self.jobs if job is None else self.of(job)
        if recorded_jobs:
            raise AssertionError(
                "enqueued was:" + "".join(f"\n  {recorded}" for recorded in recorded_jobs)
            )

    def answer(self, request: JobRequest) -> httpx.Response:
        """Answer in place of the API."""
        try:
            response = httpx.Response(200, content=msgspec.json.encode(self._answer(request)))
        except _Refusal as refusal:
            response = refusal.response
        response.request = httpx.Request(request.method, f"http://testing.invalid/v1{request.path}")
        return response

    def _answer(self, request: JobRequest) -> Any:
        parts = request.path.strip("/").split("/")
        if request.method == "POST" and parts == ["jobs"]:
            return self._enqueue(request.body or b"")
        if request.method == "POST" and parts == ["jobs", "batch"]:
            batch = msgspec.json.decode(request.body or b"", type=_BatchRequest)
            return {"jobs": [self._enqueue(bytes(raw)) for raw in batch.jobs]}
        recorded = self._by_id.get(parts[1])
        if recorded is None:
            raise _Refusal(404, "NOT_FOUND", "no job of this test has this id")
        if parts[2:] == ["cancel"] and not recorded.snapshot.ended:
            recorded.snapshot = msgspec.structs.replace(
                recorded.snapshot, state="cancelled", ended=True
            )
        if "wait" in request.query and not recorded.snapshot.ended:
            raise NotRun(
                f"{recorded} is recorded and does not run: use run_inline() where results matter"
            )
        return recorded.snapshot

    def _enqueue(self, raw: bytes) -> JobSnapshot:
        body = msgspec.json.decode(raw, type=_Body)
        with self._lock:
            known = self._by_id.get(body.options.job_id)
            if known is not None and known._body != raw:
                raise _Refusal(409, "JOB_ID_REUSED", f"another job was enqueued as {known.job_id}")
            if known is not None:
                return known.snapshot
            self._check(body)
            snapshot = JobSnapshot(
                id=body.options.job_id, type=body.type, state="waiting", ended=False
            )
            recorded = RecordedJob(
                job_id=body.options.job_id,
                type=body.type,
                args=body.args,
                options=body.options,
                snapshot=snapshot,
                _body=raw,
            )
            self.jobs.append(recorded)
            self._by_id[recorded.job_id] = recorded
        self._run(recorded)
        return recorded.snapshot

    def _check(self, body: _Body) -> None:
        size = len(msgspec.json.encode(body.args))
        if size > MAX_ARGUMENTS_BYTES:
            raise _Refusal(
                413, "BODY_TOO_LARGE", f"the arguments have {size} bytes, more than 64 KiB"
            )

    def _run(self, recorded: RecordedJob) -> None:
        """Does nothing: `InlineRunner` runs the job."""


class InlineRunner(Recorder):
    """Runs each job in the call that enqueues it.
    Delays, retries, timeouts and limits do not apply."""

    def __init__(self, *, raise_errors: bool, secrets: Mapping[str, str]) -> None:
        super().__init__()
        self._raise_errors = raise_errors
        self._secrets = secrets
        self._fence = 0

    def _check(self, body: _Body) -> None:
        super()._check(body)
        declared = _declared(body.type).type
        try:
            declared.decode_arguments(msgspec.json.encode(body.args))
        except msgspec.ValidationError as error:
            reason, _, path = str(error).partition(" - at `$")
            name = "args" + path.rstrip("`")
            raise _Refusal(422, "INVALID_REQUEST", reason, name) from None

    def _run(self, recorded: RecordedJob) -> None:
        function = _declared(recorded.type)
        declared = function.type
        progress: list[Any] = []
        self._fence += 1
        running = JobContext(
            job_id=recorded.job_id,
            type=recorded.type,
            fence=self._fence,
            deadline=time.monotonic() + (declared.timeout or DEFAULT_TIMEOUT_S),
            secrets={
                name: self._secrets[name] for name in declared.secrets if name in self._secrets
            },
            send_progress=progress.append,
        )
        began = datetime.now(UTC)
        changes: dict[str, Any] = {"ended": True, "attempt": 1, "started_at": began}
        try:
            arguments = declared.decode_arguments(msgspec.json.encode(recorded.args))
            with use_context(running):
                encoded = encode_value(_complete(declared.call(arguments)))
            if len(encoded) > MAX_RESULT_BYTES:
                raise ValueError(f"{recorded} returned {len(encoded)} bytes, more than 64 KiB")
            changes |= {"state": "done", "value": msgspec.json.decode(encoded)}
        except Exception as error:
            failure = JobFailure(code="JOB_FAILED", detail=f"{type(error).__name__}: {error}")
            changes |= {"state": "failed", "failure": failure}
            if self._raise_errors:
                raise
        finally:
            changes |= {
                "finished_at": datetime.now(UTC),
                "progress": progress[-1] if progress else None,
            }
            recorded.snapshot = msgspec.structs.replace(recorded.snapshot, **changes)


def _complete(value: Any) -> Any:
    """Return a value, or the result of a coroutine, also where an event loop is running already."""
    if not inspect.iscoroutine(value):
        return value
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(value)
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, value).result()


def _declared(name: str) -> JobFunction[..., Any]:
    for function in declared_jobs():
        if _is_of_type(name, function):
            return function
    raise _Refusal(
        404,
        "JOB_TYPE_UNKNOWN",
        f"no imported module declares {name}: import it in the test, or check the name",
    )


def _is_of_type(name: str, job: JobFunction[..., Any] | str) -> bool:
    if not isinstance(job, str):
        return name.rpartition("/")[2] == job.type.name
    return job in (name, name.rpartition("/")[2])


@contextmanager
def record() -> Iterator[Recorder]:
    """Record the jobs that are enqueued in the block, and run none.

    Waiting for a result raises `NotRun`.
    """
    recorder = Recorder()
    push_fake(recorder)
    try:
        yield recorder
    finally:
        pop_fake(recorder)


@contextmanager
def run_inline(
    *, raise_errors: bool = True, secrets: Mapping[str, str] | None = None
) -> Iterator[InlineRunner]:
    """Run each job at once, in the call that enqueues it; `context()` is given as in a runner.

    There is one attempt, and delays are skipped. With `raise_errors` an exception of the job leaves
    the call that enqueues it; without, `result` raises `JobFailed`, as in production. `secrets`:
    values of the secrets that types name.
    """
    runner = InlineRunner(raise_errors=raise_errors, secrets=secrets or {})
    push_fake(runner)
    try:
        yield runner
    finally:
        pop_fake(runner)
