"""Enqueues jobs over REST: `Producer` blocks, `AsyncProducer` is for asyncio.

    from berth_jobs import send
    from shop.jobs import resize_image

    sent = send.enqueue(resize_image, image_id=7, width=200)
    print(sent.result(timeout=30))

The functions of this module use one producer, which reads `BERTH_API_URL`, `BERTH_JOBS_APPLICATION`
and `BERTH_API_KEY` (or `BERTH_API_KEY_FILE`) from the environment when it is first used. Every job
gets its id here, so a request whose answer was lost is repeated and enqueues nothing twice. Such
jobs are kept in PostgreSQL: they survive the loss of Valkey's data.
"""

from __future__ import annotations

import asyncio
import copy
import os
import time
import typing
from collections.abc import Coroutine, Iterable
from datetime import datetime, timedelta
from typing import Any, Generic, ParamSpec, Self, TypeVar, Unpack, overload

import httpx
import msgspec

from . import api_calls
from .api_calls import (
    RETRY_FOR_S,
    Call,
    EnqueueOptions,
    JobCall,
    JobRequest,
    JobSnapshot,
    OptionValues,
)
from .connections import (
    APPLICATION_VARIABLE,
    Connection,
    ProducerSettings,
    current_fake,
    send_async,
    send_blocking,
)
from .declaration import JobFunction, encode_value
from .errors import NotConfigured, Unreachable, invalid_arguments

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class _Sender:
    """Holds what both producers share: options, and the calls that they send. It holds no
    connection.

    A call is written once (`api_calls`); the producers differ in how they send its requests. Their
    methods repeat each other's signatures, for type checkers: Python has no type for "awaitable or
    not".
    """

    def __init__(self, application: str, retry_for_s: float) -> None:
        self._application = application
        self._options = EnqueueOptions()
        self._retry_for_s = retry_for_s

    def type_name(self, job: JobFunction[..., Any] | str) -> str:
        """Return the type's full name, such as `shop/resize_image`.

        Raises `NotConfigured` for a function while the application's name is unknown.
        """
        if isinstance(job, str):
            return job
        application = self._application or os.environ.get(APPLICATION_VARIABLE, "")
        if not application and current_fake() is not None:
            application = "testing"
        if not application:
            raise NotConfigured(
                f"which application has {job.type.name}? Set {APPLICATION_VARIABLE}, pass "
                "`application` to the producer, or give the type's full name, such as "
                "shop/resize_image"
            )
        return f"{application}/{job.type.name}"

    def with_options(self, **options: Unpack[OptionValues]) -> Self:
        """Return a producer that enqueues with these options (`OptionValues`), over the same
        connections.

        Raises `ValueError` for an option that no job can have.
        """
        other = copy.copy(self)
        other._options = api_calls.options_with(self._options, options)
        return other

    def _prepare(
        self,
        job: JobFunction[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        **changes: Any,
    ) -> JobCall:
        job_id = self._options.job_id or api_calls.new_job_id()
        options = msgspec.structs.replace(self._options, job_id=job_id, **changes)
        if isinstance(job, str):
            if args:
                raise TypeError(f"name the arguments of {job}: enqueue({job!r}, name=value)")
            return JobCall(type=job, args=msgspec.Raw(_encoded(job, kwargs)), options=options)
        name = self.type_name(job)
        try:
            arguments = job.type.encode_arguments(*args, **kwargs)
        except msgspec.ValidationError as error:
            raise invalid_arguments(str(error)) from None
        return JobCall(
            type=name, args=msgspec.Raw(arguments), options=options, result_type=_result_type(job)
        )

    @overload
    def call(self, job: JobFunction[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> JobCall: ...

    @overload
    def call(self, job: str, /, **kwargs: Any) -> JobCall: ...

    def call(self, job: JobFunction[..., Any] | str, /, *args: Any, **kwargs: Any) -> JobCall:
        """Prepare a job for `enqueue_many`; its id is made here.

        Raises `TypeError` and `InvalidArguments` for arguments that the job does not take.
        """
        return self._prepare(job, args, kwargs)


def _encoded(name: str, arguments: dict[str, Any]) -> bytes:
    try:
        return encode_value(arguments)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(f"an argument of {name} cannot be sent as JSON: {error}") from None


def _result_type(job: JobFunction[..., Any]) -> Any:
    """Return the annotated type of the job's result; `Any` without an annotation."""
    return typing.get_type_hints(job.type.function).get("return", Any)


class SentJob(Generic[R]):
    """A job that was enqueued. Every method may be repeated, and raises `Refused` or
    `Unreachable`."""

    def __init__(
        self, producer: Producer, job_id: str, result_type: Any = Any, *, is_new: bool = True
    ) -> None:
        #: The job's id: keep it to look at the job from another process (`Producer.job`).
        self.id = job_id
        #: False if this is an earlier job that has the same unique key, so that no other one was
        #: enqueued.
        self.is_new = is_new
        self._producer = producer
        self._result_type = result_type

    def __repr__(self) -> str:
        return f"SentJob({self.id!r})"

    def snapshot(self) -> JobSnapshot:
        """Return the job as it stands. Raises `JobNotFound`."""
        return self._producer._run(api_calls.get(self.id))

    def progress(self) -> Any:
        """Return what the job last reported; None if it has reported nothing."""
        return self.snapshot().progress

    def wait(self, timeout: float | None = None) -> JobSnapshot:
        """Wait at most `timeout` seconds (None: for ever) until the job has ended, in whatever way.

        Raises `JobNotEnded`, which is a `TimeoutError`, when the time is over.
        """
        return self._producer._run(api_calls.wait(self.id, timeout))

    def result(self, timeout: float | None = None) -> R:
        """Wait like `wait`, and return what the job returned, as the function's annotation says.

        Raises `JobFailed`, `JobCancelled`, `ResultExpired`, `JobNotEnded`.
        """
        value: R = api_calls.value_of(self.wait(timeout), self._result_type)
        return value

    def cancel(self) -> JobSnapshot:
        """Cancel the job: one that waits ends, one that runs is killed, one that has ended stays as
        it is."""
        return self._producer._run(api_calls.cancel(self.id))


class Producer(_Sender):
    """Enqueues jobs, and blocks until the API has accepted them. Threads may share it.

    A context manager, or `close` it.
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        application: str = "",
        retry_for: float = RETRY_FOR_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Connects to `url`, the API's URL without `/v1`, with `api_key`, a key with the scope
        `jobs`.

        `application`: the name that comes before the types of decorated functions; empty:
        `BERTH_JOBS_APPLICATION`. `retry_for`: seconds for which an enqueue is repeated while the
        API is away. `transport`: for example an `httpx.HTTPTransport` with TLS settings of your
        own. Raises `NotConfigured`.
        """
        super().__init__(application, retry_for)
        client = httpx.Client(
            **ProducerSettings(url, api_key).httpx_arguments(), transport=transport
        )
        self._connection = Connection(lambda: (url.rstrip("/"), client))

    @classmethod
    def from_environment(cls) -> Self:
        """Make a producer whose settings are read from the environment when it is first used."""

        def make() -> tuple[str, httpx.Client]:
            settings = ProducerSettings.from_environment()
            return settings.url.rstrip("/"), httpx.Client(**settings.httpx_arguments())

        producer = cls.__new__(cls)
        _Sender.__init__(producer, "", RETRY_FOR_S)
        producer._connection = Connection(make)
        return producer

    def close(self) -> None:
        """Close the connections."""
        if (client := self._connection.take()) is not None:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @overload
    def enqueue(
        self, job: JobFunction[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> SentJob[R]: ...

    @overload
    def enqueue(
        self, job: JobFunction[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> SentJob[R]: ...

    @overload
    def enqueue(self, job: str, /, **kwargs: Any) -> SentJob[Any]: ...

    def enqueue(
        self, job: JobFunction[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> SentJob[Any]:
        """Enqueue a job: a decorated function, or a type's name such as `shop/resize_image`.

        Raises `InvalidArguments`, `UnknownJobType`, `JobTooLarge`, `JobIdReused`, another
        `Refused`; `Unreachable` if certainly nothing was enqueued, `EnqueueUnsettled` if that is
        not known.
        """
        return self._enqueue(self._prepare(job, args, kwargs))

    @overload
    def enqueue_in(
        self,
        delay: float | timedelta,
        job: JobFunction[P, Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> SentJob[R]: ...

    @overload
    def enqueue_in(
        self, delay: float | timedelta, job: JobFunction[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> SentJob[R]: ...

    @overload
    def enqueue_in(self, delay: float | timedelta, job: str, /, **kwargs: Any) -> SentJob[Any]: ...

    def enqueue_in(
        self,
        delay: float | timedelta,
        job: JobFunction[..., Any] | str,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> SentJob[Any]:
        """Enqueue a job that may run after `delay` seconds.

        Raises `ValueError`, and what `enqueue` raises.
        """
        return self._enqueue(self._prepare(job, args, kwargs, delay_s=api_calls.seconds_of(delay)))

    @overload
    def enqueue_at(
        self,
        when: datetime,
        job: JobFunction[P, Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> SentJob[R]: ...

    @overload
    def enqueue_at(
        self, when: datetime, job: JobFunction[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> SentJob[R]: ...

    @overload
    def enqueue_at(self, when: datetime, job: str, /, **kwargs: Any) -> SentJob[Any]: ...

    def enqueue_at(
        self, when: datetime, job: JobFunction[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> SentJob[Any]:
        """Enqueue a job that may run from `when` on, by the API's clock; at once if it is past.

        `when` has a time zone. Raises `ValueError`, and what `enqueue` raises.
        """
        return self._enqueue(self._prepare(job, args, kwargs, run_at=api_calls.checked_time(when)))

    def enqueue_many(self, calls: Iterable[JobCall]) -> list[SentJob[Any]]:
        """Enqueue jobs in their order, some hundreds with one request. `calls` come from `call`.

        Raises what `enqueue` raises. The jobs before the failed batch are enqueued; the same calls
        may be sent again, because each has its id.
        """
        prepared = list(calls)
        snapshots = self._run(api_calls.enqueue_many(prepared, self._retry_for_s))
        return [
            SentJob(self, snapshot.id, call.result_type, is_new=snapshot.id == call.job_id)
            for call, snapshot in zip(prepared, snapshots, strict=True)
        ]

    def job(self, job_id: str) -> SentJob[Any]:
        """Return a handle of a job that was enqueued earlier, or elsewhere. Asks the API
        nothing."""
        return SentJob(self, job_id)

    def _enqueue(self, call: JobCall) -> SentJob[Any]:
        snapshot = self._run(api_calls.enqueue(call, self._retry_for_s))
        return SentJob(self, snapshot.id, call.result_type, is_new=snapshot.id == call.job_id)

    def _run(self, call: Call[T]) -> T:
        answer: httpx.Response | Unreachable | None = None
        while True:
            try:
                step = call.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(step, JobRequest):
                answer = send_blocking(self._connection, step)
            else:
                time.sleep(step)
                answer = None


class AsyncSentJob(Generic[R]):
    """A job that was enqueued, for asyncio. Otherwise as `SentJob`."""

    def __init__(
        self, producer: AsyncProducer, job_id: str, result_type: Any = Any, *, is_new: bool = True
    ) -> None:
        #: The job's id.
        self.id = job_id
        #: False if this is an earlier job that has the same unique key.
        self.is_new = is_new
        self._producer = producer
        self._result_type = result_type

    def __repr__(self) -> str:
        return f"AsyncSentJob({self.id!r})"

    async def snapshot(self) -> JobSnapshot:
        """Return the job as it stands. Raises `JobNotFound`."""
        return await self._producer._run(api_calls.get(self.id))

    async def progress(self) -> Any:
        """Return what the job last reported; None if it has reported nothing."""
        return (await self.snapshot()).progress

    async def wait(self, timeout: float | None = None) -> JobSnapshot:
        """Wait at most `timeout` seconds (None: for ever) until the job has ended. Raises
        `JobNotEnded`."""
        return await self._producer._run(api_calls.wait(self.id, timeout))

    async def result(self, timeout: float | None = None) -> R:
        """Wait like `wait`, and return what the job returned.

        Raises `JobFailed`, `JobCancelled`, `ResultExpired`, `JobNotEnded`.
        """
        value: R = api_calls.value_of(await self.wait(timeout), self._result_type)
        return value

    async def cancel(self) -> JobSnapshot:
        """Cancel the job: one that waits ends, one that runs is killed, one that has ended stays as
        it is."""
        return await self._producer._run(api_calls.cancel(self.id))


class AsyncProducer(_Sender):
    """Enqueues jobs from asyncio. An asynchronous context manager, or `aclose` it.

    Its methods are those of `Producer`, to be awaited; errors are the same.
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        application: str = "",
        retry_for: float = RETRY_FOR_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Connects as `Producer` does; `transport` is an `httpx.AsyncHTTPTransport`. Raises
        `NotConfigured`."""
        super().__init__(application, retry_for)
        client = httpx.AsyncClient(
            **ProducerSettings(url, api_key).httpx_arguments(), transport=transport
        )
        self._connection = Connection(lambda: (url.rstrip("/"), client))

    @classmethod
    def from_environment(cls) -> Self:
        """Make a producer whose settings are read from the environment when it is first used."""

        def make() -> tuple[str, httpx.AsyncClient]:
            settings = ProducerSettings.from_environment()
            return settings.url.rstrip("/"), httpx.AsyncClient(**settings.httpx_arguments())

        producer = cls.__new__(cls)
        _Sender.__init__(producer, "", RETRY_FOR_S)
        producer._connection = Connection(make)
        return producer

    async def aclose(self) -> None:
        """Close the connections."""
        if (client := self._connection.take()) is not None:
            await client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.aclose()

    @overload
    async def enqueue(
        self, job: JobFunction[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncSentJob[R]: ...

    @overload
    async def enqueue(
        self, job: JobFunction[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncSentJob[R]: ...

    @overload
    async def enqueue(self, job: str, /, **kwargs: Any) -> AsyncSentJob[Any]: ...

    async def enqueue(
        self, job: JobFunction[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> AsyncSentJob[Any]:
        """Enqueue a job, as `Producer.enqueue`."""
        return await self._enqueue(self._prepare(job, args, kwargs))

    @overload
    async def enqueue_in(
        self,
        delay: float | timedelta,
        job: JobFunction[P, Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> AsyncSentJob[R]: ...

    @overload
    async def enqueue_in(
        self, delay: float | timedelta, job: JobFunction[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncSentJob[R]: ...

    @overload
    async def enqueue_in(
        self, delay: float | timedelta, job: str, /, **kwargs: Any
    ) -> AsyncSentJob[Any]: ...

    async def enqueue_in(
        self,
        delay: float | timedelta,
        job: JobFunction[..., Any] | str,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncSentJob[Any]:
        """Enqueue a job that may run after `delay` seconds, as `Producer.enqueue_in`."""
        return await self._enqueue(
            self._prepare(job, args, kwargs, delay_s=api_calls.seconds_of(delay))
        )

    @overload
    async def enqueue_at(
        self,
        when: datetime,
        job: JobFunction[P, Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> AsyncSentJob[R]: ...

    @overload
    async def enqueue_at(
        self, when: datetime, job: JobFunction[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncSentJob[R]: ...

    @overload
    async def enqueue_at(self, when: datetime, job: str, /, **kwargs: Any) -> AsyncSentJob[Any]: ...

    async def enqueue_at(
        self, when: datetime, job: JobFunction[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> AsyncSentJob[Any]:
        """Enqueue a job that may run from `when` on, as `Producer.enqueue_at`."""
        return await self._enqueue(
            self._prepare(job, args, kwargs, run_at=api_calls.checked_time(when))
        )

    async def enqueue_many(self, calls: Iterable[JobCall]) -> list[AsyncSentJob[Any]]:
        """Enqueue jobs in their order, as `Producer.enqueue_many`."""
        prepared = list(calls)
        snapshots = await self._run(api_calls.enqueue_many(prepared, self._retry_for_s))
        return [
            AsyncSentJob(self, snapshot.id, call.result_type, is_new=snapshot.id == call.job_id)
            for call, snapshot in zip(prepared, snapshots, strict=True)
        ]

    def job(self, job_id: str) -> AsyncSentJob[Any]:
        """Return a handle of a job that was enqueued earlier, or elsewhere. Asks the API
        nothing."""
        return AsyncSentJob(self, job_id)

    async def _enqueue(self, call: JobCall) -> AsyncSentJob[Any]:
        snapshot = await self._run(api_calls.enqueue(call, self._retry_for_s))
        return AsyncSentJob(self, snapshot.id, call.result_type, is_new=snapshot.id == call.job_id)

    async def _run(self, call: Call[T]) -> T:
        answer: httpx.Response | Unreachable | None = None
        while True:
            try:
                step = call.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(step, JobRequest):
                answer = await send_async(self._connection, step)
            else:
                await asyncio.sleep(step)
                answer = None


#: The producer of this module's functions. Its settings are read from the environment at its first
#: use.
environment_producer = Producer.from_environment()

enqueue = environment_producer.enqueue
enqueue_in = environment_producer.enqueue_in
enqueue_at = environment_producer.enqueue_at
enqueue_many = environment_producer.enqueue_many
call = environment_producer.call
with_options = environment_producer.with_options
job = environment_producer.job
close = environment_producer.close
