"""Enqueues jobs directly into Valkey: fast, and lost when Valkey loses its data.

    from berth_jobs.direct import DirectProducer

    producer = DirectProducer("rediss://shop:…@valkey.example:6379", "shop.key", application="shop")
    producer.enqueue_many(producer.call(count_visit, page=page) for page in pages)

Use it for jobs that may be lost, or that something enqueues again: nothing keeps them in
PostgreSQL, as it does those of `Producer`. It needs `berth-jobs[direct]`, the application's key
file and Valkey user, and the job's function, whose options it reads. The key file lets its holder
enqueue jobs of this application only.
"""

from __future__ import annotations

import copy
import hashlib
import random
import time
from binascii import b2a_base64
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, Self, Unpack
from urllib.parse import urlsplit

import msgspec
import redis
from redis.exceptions import AuthenticationError, NoScriptError, RedisError, ResponseError
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import TimeoutError as TooLate

from . import api_calls
from .api_calls import MAX_PAUSE_S, EnqueueOptions, OptionValues
from .declaration import JobFunction
from .errors import (
    EnqueueUnsettled,
    JobIdReused,
    JobTooLarge,
    NotConfigured,
    ProblemDetails,
    Unreachable,
    ValkeyRefused,
    invalid_arguments,
)
from .manifest import BadManifest, ManifestType, check_application, describe_type
from .options import JobDefaults, fields_depend_on_arguments, job_fields

P = ParamSpec("P")

#: Bytes of the arguments and of the whole message, as runners take them.
MAX_ARGUMENTS_BYTES, MAX_JOB_BYTES = 64 * 1024, 64 * 1024 + 4096
#: Jobs that are sent before their replies are read, and jobs of one call of the script. A call of
#: 25 jobs costs Valkey half of 25 calls, and more jobs gain nothing (measured); other clients wait
#: for its 0.4 ms.
JOBS_PER_PIPELINE, JOBS_PER_SCRIPT_CALL = 500, 25
#: Seconds for which an enqueue is repeated while Valkey is away.
RETRY_FOR_S = 10.0
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 5.0, 10.0
#: Milliseconds of waiting that one step of priority is worth, unless the queue's settings say
#: otherwise.
BOOST_MS = 60_000
#: The queue without priorities.
FIFO_QUEUE = "scheduler"

_FOLDER = Path(__file__).parent
_SCRIPT = "".join(
    (_FOLDER / name).read_text(encoding="utf-8") for name in ("queue_lib.lua", "enqueue.lua")
)
_SCRIPT_SHA = hashlib.sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()


class DirectJob(NamedTuple):
    """Says what became of a job that was enqueued."""

    #: The job's id. With a key of the scope `jobs`, `Producer.job` shows the job.
    id: str
    #: The id of the job that has the same unique key, so that this one was not enqueued; otherwise
    #: empty.
    duplicate_of: str = ""
    #: False if nothing was enqueued: `duplicate_of` names another job, or the id was known. Once
    #: that job has ended, nobody can say for which call it was.
    is_new: bool = True


class DirectCall(NamedTuple):
    """A job, signed and ready to be enqueued (`DirectProducer.call`)."""

    job_id: str
    #: The values of `enqueue.lua`.
    arguments: tuple[Any, ...]


class _JobTemplate(NamedTuple):
    """Holds what all jobs of one type with the same options share."""

    #: Members of the job's JSON, before and after its arguments.
    before: bytes
    after: bytes
    #: The values of `enqueue.lua` but the first two.
    script_values: tuple[Any, ...]

    @classmethod
    def of(cls, fields: dict[str, Any]) -> _JobTemplate:
        """Make a template of a job's fields, as `job_fields` returns them."""
        names = list(fields)
        at = names.index("args")
        before = {name: fields[name] for name in names[:at]}
        after = {name: fields[name] for name in names[at + 1 :]}
        values = (
            f"{fields['name']}@{fields['type_version']}",
            fields["queue"],
            0 if fields["queue"] == FIFO_QUEUE else fields["priority"],
            int(fields["idempotent"]),
            fields["unique"],
            fields["group"],
            round(fields["delay"] * 1000),
            BOOST_MS,
            fields["rate_key"],
            "",
            round(fields["unique_for"] * 1000),
            fields["on_failed"],
        )
        return cls(msgspec.json.encode(before)[1:-1], msgspec.json.encode(after)[1:-1], values)

    def encode(self, job_id: str, arguments: bytes) -> bytes:
        """Return one job's JSON."""
        return b'{"type":"job","v":1,"job_id":%b,%b,"args":%b,%b}' % (
            msgspec.json.encode(job_id),
            self.before,
            arguments,
            self.after,
        )


class _ScriptMissing(Exception):
    """Valkey does not know the script."""


class DirectProducer:
    """Enqueues jobs into Valkey. Threads may share it. A context manager, or `close` it.

    Methods block. Jobs that wait are lost when Valkey loses its data.
    """

    def __init__(
        self,
        valkey_url: str,
        key_file: str | Path,
        *,
        application: str,
        defaults: JobDefaults | None = None,
        retry_for: float = RETRY_FOR_S,
        use_login: bool = True,
        **connection: Any,
    ) -> None:
        """Connects to `valkey_url`; if that names no user, by the application's own login, which
        follows from the keys. `key_file` has the application's keys, which only its owner may read.
        `defaults` are those of the deployment, where it has others.

        `retry_for`: seconds for which an enqueue is repeated while Valkey is away. `use_login`:
        False for a Valkey that asks for none. `connection`: arguments for `redis.Redis.from_url`,
        such as `ssl_ca_certs`. Raises `NotConfigured`.
        """
        try:
            self._application = check_application(application)
            settings: dict[str, Any] = {
                "socket_connect_timeout": CONNECT_TIMEOUT_S,
                "socket_timeout": ANSWER_TIMEOUT_S,
            }
            keys = _read_keys(Path(key_file))
            if not (urlsplit(valkey_url).username or urlsplit(valkey_url).password) and use_login:
                settings |= {
                    "username": f"fleet-app:{application}",
                    "password": _password(keys),
                }
            self._signer = _Signer(keys)
            self._redis = redis.Redis.from_url(valkey_url, **settings, **connection)
        except (BadManifest, ValueError) as error:
            raise NotConfigured(str(error)) from None
        self._settings_key = f"jobs:{{app:{application}}}:meta"
        self._defaults = defaults or JobDefaults()
        self._retry_for_s = retry_for
        self._options = EnqueueOptions()
        self._kinds: dict[JobFunction[..., Any], ManifestType] = {}
        #: With `_options`; only of types whose fields do not depend on a job's arguments.
        self._templates: dict[JobFunction[..., Any], _JobTemplate] = {}

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def with_options(self, **options: Unpack[OptionValues]) -> Self:
        """Return a producer that enqueues with these options (`OptionValues`), over the same
        connections.

        Raises `ValueError` for an option that no job can have.
        """
        other = copy.copy(self)
        other._options = api_calls.options_with(self._options, options)
        other._templates = {}
        return other

    def call(self, job: JobFunction[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> DirectCall:
        """Prepare and sign a job for `enqueue_many`; its id is made here.

        Raises `TypeError`, `InvalidArguments` or `JobTooLarge` for arguments that the job does not
        take.
        """
        return self._prepare(job, args, kwargs)

    def enqueue(self, job: JobFunction[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> DirectJob:
        """Enqueue a job; the same id again enqueues nothing as long as the job or its result is
        there.

        Raises what `call` raises; `JobIdReused` if another job that has not ended has the id;
        `Unreachable` if certainly nothing was enqueued, `EnqueueUnsettled` if that is not known.
        """
        return self._send([self._prepare(job, args, kwargs)])[0]

    def enqueue_in(
        self,
        delay: float | timedelta,
        job: JobFunction[P, Any],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> DirectJob:
        """Enqueue a job that may run after `delay` seconds.

        Raises `ValueError`, and what `enqueue` raises.
        """
        call = self._prepare(job, args, kwargs, delay_s=api_calls.seconds_of(delay))
        return self._send([call])[0]

    def enqueue_at(
        self, when: datetime, job: JobFunction[P, Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> DirectJob:
        """Enqueue a job that may run from `when` on, by this machine's clock; at once if it is
        past.

        `when` has a time zone. Raises `ValueError`, and what `enqueue` raises.
        """
        call = self._prepare(job, args, kwargs, delay_s=api_calls.seconds_until(when))
        return self._send([call])[0]

    def enqueue_many(self, calls: Iterable[DirectCall]) -> list[DirectJob]:
        """Enqueue jobs in their order, some hundreds in one round trip.

        Raises what `enqueue` raises. The jobs of the trips before are enqueued, and after
        `JobIdReused` the others of the same trip; the same calls may be sent again, because each
        has its id.
        """
        iterator = iter(calls)
        batches = iter(lambda: list(islice(iterator, JOBS_PER_PIPELINE)), [])
        jobs = self._send(next(batches, []))  # loads the script, if Valkey does not know it
        connection: Any = self._redis.connection_pool.get_connection()  # redis-py types it in part
        pending: list[DirectCall] = []
        try:
            # While Valkey works on one batch, the next one is made.
            for batch in chain(batches, [[]]):
                try:
                    if batch:
                        commands = [self._command(group) for group in _groups(batch)]
                        connection.send_packed_command(connection.pack_commands(commands))
                    replies = [_read_reply(connection) for _ in _groups(pending)]
                    done = self._jobs_of(pending, replies)
                except (ConnectionLost, TooLate, _ScriptMissing):
                    connection.disconnect()
                    done, batch = self._send(pending) + self._send(batch), []
                jobs += done
                pending = batch
        finally:
            if pending:  # `calls` raised: what it left unread is no answer to the next user
                connection.disconnect()
            self._redis.connection_pool.release(connection)
        return jobs

    def _prepare(
        self,
        job: JobFunction[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        **changes: Any,
    ) -> DirectCall:
        if not isinstance(job, JobFunction):
            raise TypeError(
                "a direct producer needs the function, whose options it reads; names need the API"
            )
        options = msgspec.structs.replace(self._options, **changes) if changes else self._options
        job_id = options.job_id or api_calls.new_job_id()
        try:
            arguments = job.type.encode_arguments(*args, **kwargs)
        except msgspec.ValidationError as error:
            raise invalid_arguments(str(error)) from None
        template = None if changes else self._templates.get(job)
        if template is None:
            template = self._template(job, arguments, options, keep=not changes)
        body = template.encode(job_id, arguments)
        if len(arguments) > MAX_ARGUMENTS_BYTES or len(body) > MAX_JOB_BYTES:
            detail = (
                f"the job has {len(body)} bytes, more than 64 KiB; store its data and "
                "pass their address"
            )
            raise JobTooLarge(413, ProblemDetails(code="JOB_TOO_LARGE", detail=detail))
        return DirectCall(job_id, (job_id, self._signer.sign(body), *template.script_values))

    def _template(
        self, job: JobFunction[..., Any], arguments: bytes, options: EnqueueOptions, *, keep: bool
    ) -> _JobTemplate:
        """Make a job's template, and keep it if it fits other arguments, too."""
        kind = self._kind(job)
        template = _JobTemplate.of(job_fields(kind, arguments, options, self._defaults))
        if keep and not fields_depend_on_arguments(kind, options):
            self._templates[job] = template
        return template

    def _kind(self, job: JobFunction[..., Any]) -> ManifestType:
        kind = self._kinds.get(job)
        if kind is None:
            try:
                kind = describe_type(self._application, job.type)
            except BadManifest as error:
                raise TypeError(str(error)) from None
            self._kinds[job] = kind
        return kind

    def _send(self, calls: Sequence[DirectCall]) -> list[DirectJob]:
        """Send calls in one round trip, again while Valkey is away: a known job is not added
        twice."""
        deadline = time.monotonic() + self._retry_for_s
        pause_s, may_be_done = api_calls.FIRST_PAUSE_S, False
        while True:
            failure: Exception
            try:
                return self._send_once(calls)
            except AuthenticationError as error:
                raise NotConfigured(f"Valkey refused the application's login: {error}") from None
            except _ScriptMissing as error:  # an orchestrator loads it after a restart of Valkey
                failure = ValkeyRefused(str(error))
            except (ConnectionLost, TooLate) as error:
                may_be_done = may_be_done or "connecting" not in str(error)
                failure = Unreachable(f"Valkey cannot be reached: {error}")
            sleep_s = pause_s * random.uniform(0.75, 1.25)  # noqa: S311 - no secret
            if time.monotonic() + sleep_s > deadline:
                raise EnqueueUnsettled(calls[0].job_id) if may_be_done else failure from failure
            time.sleep(sleep_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _send_once(self, calls: Sequence[DirectCall]) -> list[DirectJob]:
        return self._jobs_of(calls, self._replies_to(_groups(calls)))

    def _replies_to(self, groups: Sequence[Sequence[DirectCall]]) -> list[Any]:
        pipeline = self._redis.pipeline(transaction=False)
        for group in groups:
            pipeline.evalsha(*self._command(group)[1:])
        return pipeline.execute(raise_on_error=False)

    def _command(self, group: Sequence[DirectCall]) -> tuple[Any, ...]:
        values = chain.from_iterable(call.arguments for call in group)
        return ("EVALSHA", _SCRIPT_SHA, 1, self._settings_key, *values)

    def _jobs_of(self, calls: Sequence[DirectCall], replies: list[Any]) -> list[DirectJob]:
        """Return what became of each call, by the replies to their groups; loads the script for
        those that missed it, and sends them again.

        Raises `ValkeyRefused`, `JobIdReused`.
        """
        groups = _groups(calls)
        missing = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if missing:
            try:
                self._redis.script_load(_SCRIPT)
            except ResponseError as error:
                raise _ScriptMissing(
                    "Valkey does not know the script of this release of berth-jobs, and the login "
                    "may not load it: use the release of berth-jobs that belongs to the servers "
                    f"({error})"
                ) from None
            for at, reply in zip(
                missing, self._replies_to([groups[at] for at in missing]), strict=True
            ):
                replies[at] = reply
        jobs, known = [], []
        for group, reply in zip(groups, replies, strict=True):
            if isinstance(reply, RedisError):
                raise ValkeyRefused(f"Valkey refused job {group[0].job_id}: {reply}")
            # Two values for each job.
            for call, outcome, job_id in zip(group, reply[::2], reply[1::2], strict=True):
                duplicate_of = job_id.decode() if outcome == b"duplicate" else ""
                jobs.append(DirectJob(call.job_id, duplicate_of, outcome == b"queued"))
                if outcome == b"seen":
                    known.append(call)
        self._refuse_reused(known)
        return jobs

    def _refuse_reused(self, calls: Sequence[DirectCall]) -> None:
        """Raise `JobIdReused` if one of these known ids belongs to another job, as far as that has
        not ended."""
        for group in _groups(calls):
            pipeline = self._redis.pipeline(transaction=False)
            for call in group:
                pipeline.hget(f"{self._settings_key.removesuffix('meta')}job:{call.job_id}", "body")
            bodies = pipeline.execute(raise_on_error=False)
            for call, body in zip(group, bodies, strict=True):
                if isinstance(body, bytes) and not _is_same_job(call.arguments[1], body):
                    detail = f"another job was enqueued as {call.job_id}; choose another id"
                    raise JobIdReused(409, ProblemDetails(code="JOB_ID_REUSED", detail=detail))


def _is_same_job(asked: bytes, known: bytes) -> bool:
    """Return True if two signed jobs were made for the same call.

    Their MACs differ after a rotation of the keys, their delays if the call names a time, and their
    fields if another release has made one of them.
    """
    ours, theirs = (msgspec.json.decode(body.partition(b" ")[2]) for body in (asked, known))
    return all(ours[name] == theirs[name] for name in ours.keys() & theirs.keys() - {"delay"})


def _groups(calls: Sequence[DirectCall]) -> list[Sequence[DirectCall]]:
    """Return the calls in groups: the script is called once for each."""
    return [
        calls[at : at + JOBS_PER_SCRIPT_CALL] for at in range(0, len(calls), JOBS_PER_SCRIPT_CALL)
    ]


def _read_reply(connection: Any) -> Any:
    """Return one reply; an error of the command is returned, too."""
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def _read_keys(path: Path) -> tuple[tuple[bytes, bytes], ...]:
    """Return an application's keys as (version, key), newest first. Raises `NotConfigured`."""
    try:
        if path.stat().st_mode & 0o077:
            raise NotConfigured(f"{path}: others can read this key; run chmod 600 on it")
        keys = msgspec.json.decode(path.read_bytes(), type=tuple[tuple[int, bytes], ...])
    except OSError as error:
        raise NotConfigured(f"cannot read the application's keys: {error}") from None
    except ValueError:  # msgspec's errors are ValueErrors; none may show a key
        raise NotConfigured(f"{path} does not hold the keys of an application") from None
    if not keys:
        raise NotConfigured(f"{path} does not hold the keys of an application")
    return tuple((str(version).encode(), key) for version, key in keys)


def _password(keys: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the password of the application's Valkey user, as orchestrators derive it."""
    newest = keys[0][1]
    return hashlib.blake2b(
        newest, person=b"valkey jobs", digest_size=32, key=b"berth job fleet"
    ).hexdigest()


class _Signer:
    """Puts one MAC for each key in front of a job, as runners read it."""

    def __init__(self, keys: Sequence[tuple[bytes, bytes]]) -> None:
        # Which parts are signed: `worker_runtime/protocol/authentication.py`.
        head = _part(b",".join([version for version, _ in keys])) + _part(b"job/1")
        #: Each version, and a MAC of the first two parts, which are the same for all jobs.
        self._begun = [
            (version, hashlib.blake2b(head, key=key, digest_size=16)) for version, key in keys
        ]

    def sign(self, body: bytes) -> bytes:
        macs, part = [], _part(body)
        for version, begun in self._begun:
            mac = begun.copy()
            mac.update(part)
            macs.append(version + b"." + b2a_base64(mac.digest(), newline=False))
        return b",".join(macs) + b" " + body


def _part(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data
