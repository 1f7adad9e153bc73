"""A direct producer on a real Valkey: it enqueues what the API would, once, and its errors are
clear."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from infra.berth_jobs import direct, errors, job
from infra.berth_jobs.api_calls import EnqueueOptions
from infra.berth_jobs.direct import DirectProducer
from infra.berth_jobs.manifest import describe_type
from infra.berth_jobs.options import job_fields
from infra.local.process import free_port
from infra.local.servers import ValkeyServer
from infra.valkey.job_login import passwords_of_jobs, user_of_jobs
from infra.valkey.job_users import job_fleet_rights
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import messages
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.jobs.protocol.calls import enqueue
from worker_runtime.jobs.protocol.messages import Job, read_signed_job
from worker_runtime.protocol.authentication import MessageKey
from worker_runtime.protocol.errors import InvalidSignature

KEYS = (MessageKey(1002, b"n" * 32), MessageKey(1001, b"k" * 32))
TAG = job_keys.application_tag("shop")


@job(
    name="jobs.count", queue="counts", priority=7, group="page-{page}", max_attempts=3, rate="100/s"
)
def count(page: str, visits: int = 1) -> None:
    """Counts visits."""


@job(name="jobs.once", unique_for=60)
def once(page: str) -> None:
    """Runs once a minute."""


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "shop.key"
    path.write_bytes(msgspec.json.encode(KEYS))
    path.chmod(0o600)
    return path


@pytest.fixture
def client(valkey_server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_server.url) as client:
        client.flushall()
        client.script_flush()
        yield client


@pytest.fixture
def producer(
    client: redis.Redis, valkey_server: ValkeyServer, key_file: Path
) -> Iterator[DirectProducer]:
    with DirectProducer(
        valkey_server.url, key_file, application="shop", use_login=False
    ) as producer:
        yield producer


def stored(client: redis.Redis, job_id: str) -> dict[str, str]:
    """The fields of a job in Valkey; its body without what differs at each call."""
    fields: Any = client.hgetall(job_keys.job(TAG, job_id))
    return {name.decode(): value.decode() for name, value in fields.items()}


def test_the_scripts_of_the_package_are_those_of_the_servers(jobs_distribution: Path) -> None:
    installed = jobs_distribution / "berth_jobs"
    source = "".join((installed / name).read_text() for name in ("queue_lib.lua", "enqueue.lua"))
    assert source == direct._SCRIPT == job_scripts.ENQUEUE.source
    limits = (direct.MAX_JOB_BYTES, direct.BOOST_MS, direct.FIFO_QUEUE)
    assert limits == (messages.MAX_JOB_BYTES, messages.BOOST_MS, messages.FIFO_QUEUE)


def test_a_job_is_what_the_api_would_enqueue(client: redis.Redis, producer: DirectProducer) -> None:
    sent = producer.with_options(priority=9, timeout=timedelta(seconds=7)).enqueue(
        count, "a b", visits=2
    )
    fields = stored(client, sent.id)
    job, _ = read_signed_job(fields["body"].encode(), sent.id, KEYS)
    kind = describe_type("shop", count.type)
    options = EnqueueOptions(priority=9, timeout_s=7.0)
    expected = Job(job_id=sent.id, **job_fields(kind, b'{"page":"a b","visits":2}', options))
    assert msgspec.json.encode(job) == msgspec.json.encode(expected)
    call = enqueue(expected, KEYS, TAG)
    assert (call.script, call.keys) == (job_scripts.ENQUEUE, [job_keys.meta(TAG)])
    client.delete(job_keys.job(TAG, sent.id))
    client.eval(call.script.source, 1, *call.keys, *call.args)
    again = stored(client, sent.id)
    # The second one waits behind the first.
    for name in ("score", "due", "queued_at", "body", "state"):
        fields.pop(name), again.pop(name)
    assert fields == again


def test_nobody_without_the_applications_key_signs_its_jobs(
    client: redis.Redis, producer: DirectProducer
) -> None:
    sent = producer.enqueue(count, "a")
    body = stored(client, sent.id)["body"].encode()
    read_signed_job(body, sent.id, KEYS[:1])
    read_signed_job(body, sent.id, KEYS[1:])
    with pytest.raises(InvalidSignature):
        read_signed_job(body, sent.id, (MessageKey(1002, b"x" * 32),))


def test_many_jobs_are_enqueued_in_their_order_although_the_script_was_unknown(
    client: redis.Redis, producer: DirectProducer
) -> None:
    sent = producer.enqueue_many(producer.call(once, f"p{number}") for number in range(1700))
    waiting: Any = client.zrange(job_keys.subqueue(TAG, "default", "shop/jobs.once@1"), 0, -1)
    assert [name.decode() for name in waiting] == [job.id for job in sent]
    assert producer.enqueue_many([]) == []


def test_jobs_of_one_call_are_kept_as_if_each_had_come_alone(
    client: redis.Redis, producer: DirectProducer
) -> None:
    same_id = producer.with_options(job_id="same")
    late = producer.with_options(delay=60)
    calls = [
        producer.call(once, "a"),
        producer.call(once, "a"),  # its unique key is taken
        producer.call(count, "x"),
        producer.call(count, "x", visits=2),  # waits for its group
        same_id.call(count, "y"),
        same_id.call(count, "y"),  # a repeat
        late.call(once, "z"),
    ]
    many = producer.enqueue_many(calls)
    duplicates = [job.duplicate_of for job in many]
    assert duplicates == ["", many[0].id, "", "", "", "", ""]
    ids = sorted({job.id for job in many if not job.duplicate_of})
    together = {job_id: stored(client, job_id) for job_id in ids}
    counted = job_keys.subqueue(TAG, "counts", "shop/jobs.count@1")
    waiting = client.zrange(counted, 0, -1)
    assert waiting == [many[2].id.encode(), b"same"]
    assert together[many[3].id]["state"] == "grouped"
    client.flushall()
    alone = [producer.enqueue_many([call])[0] for call in calls]
    assert alone == many
    assert client.zrange(counted, 0, -1) == waiting
    scores = []
    for job_id in ids:
        alone_fields, batch_fields = stored(client, job_id), together[job_id]
        for fields in (alone_fields, batch_fields):
            scores.append(float(fields.pop("score")))
            delay = int(fields.pop("due", 0)) - int(fields.pop("queued_at", 0))
            fields["delay"] = str(delay)
        assert alone_fields == batch_fields
    assert len(set(scores)) == len(scores)


def test_the_settings_tell_which_position_was_the_last(
    client: redis.Redis, producer: DirectProducer
) -> None:
    producer.enqueue_many(producer.call(once, f"p{number}") for number in range(40))
    last = float(client.hget(job_keys.meta(TAG), "sequence") or 0)
    waiting: Any = client.zrange(
        job_keys.subqueue(TAG, "default", "shop/jobs.once@1"), 0, -1, withscores=True
    )
    assert waiting[-1][1] == last - once.type.priority * direct.BOOST_MS * 1000


def test_a_job_waits_for_its_time(client: redis.Redis, producer: DirectProducer) -> None:
    later = producer.enqueue_in(timedelta(minutes=1), once, "a")
    tomorrow = producer.enqueue_at(datetime.now(UTC) + timedelta(days=1), once, "b")
    due: Any = client.zrange(job_keys.delayed(TAG), 0, -1, withscores=True)
    now_ms = datetime.now(UTC).timestamp() * 1000
    assert [name.decode() for name, _ in due] == [later.id, tomorrow.id]
    assert [at - now_ms for _, at in due] == pytest.approx([60_000, 86_400_000], abs=20_000)


def test_a_repeat_and_a_second_unique_job_enqueue_nothing(
    client: redis.Redis, producer: DirectProducer
) -> None:
    first = producer.with_options(job_id="one").enqueue(once, "a")
    again = producer.with_options(job_id="one").enqueue(once, "a")
    assert (first, again) == (("one", "", True), ("one", "", False))
    second = producer.enqueue(once, "a")
    assert (second.duplicate_of, second.is_new) == ("one", False)
    assert client.exists(job_keys.job(TAG, second.id)) == 0


def test_another_job_under_a_known_id_is_refused_until_the_job_has_ended(
    client: redis.Redis, producer: DirectProducer, key_file: Path, valkey_server: ValkeyServer
) -> None:
    mine = producer.with_options(job_id="mine")
    mine.enqueue(count, "a", visits=2)
    for other in (
        mine.call(count, "b", visits=2),
        mine.call(once, "a"),
        mine.with_options(priority=9).call(count, "a", visits=2),
    ):
        with pytest.raises(errors.JobIdReused, match="another job was enqueued as mine"):
            producer.enqueue_many([producer.call(count, "c"), other])
    # The same job again, later and with the keys after a rotation.
    assert mine.enqueue_in(5, count, "a", visits=2) == ("mine", "", False)
    key_file.write_bytes(msgspec.json.encode([(1003, b"n" * 32), *KEYS]))
    with DirectProducer(
        valkey_server.url, key_file, application="shop", use_login=False
    ) as rotated:
        sent = rotated.with_options(job_id="mine").enqueue(count, "a", visits=2)
    assert not sent.is_new
    client.rename(job_keys.job(TAG, "mine"), job_keys.result(TAG, "mine"))  # it has ended
    assert mine.enqueue(count, "b") == ("mine", "", False)


def test_jobs_are_enqueued_once_each_past_a_restart_of_valkey(
    tmp_path: Path, key_file: Path
) -> None:
    port = free_port()
    with ValkeyServer(tmp_path / "valkey", port=port, durable=True) as server:
        with DirectProducer(
            server.url, key_file, application="shop", use_login=False, retry_for=30
        ) as producer:
            restarted = threading.Event()

            def restart() -> None:
                server.kill()
                server.start()
                restarted.set()

            def calls() -> Iterator[direct.DirectCall]:
                for number in range(3000):
                    if number == 1200:
                        threading.Thread(target=restart).start()
                    if number == 2400:
                        restarted.wait(30)
                    yield producer.call(once, f"p{number}")

            sent = producer.enqueue_many(calls())
        with redis.Redis.from_url(server.url) as client:
            waiting: Any = client.zrange(
                job_keys.subqueue(TAG, "default", "shop/jobs.once@1"), 0, -1
            )
    assert sorted(name.decode() for name in waiting) == sorted(job.id for job in sent)


def test_a_valkey_that_is_away_is_distinguished_from_one_that_refuses(
    client: redis.Redis, valkey_server: ValkeyServer, key_file: Path
) -> None:
    away = DirectProducer(
        f"redis://127.0.0.1:{free_port()}",
        key_file,
        application="shop",
        use_login=False,
        retry_for=0.1,
    )
    with away, pytest.raises(errors.Unreachable, match="Valkey cannot be reached"):
        away.enqueue(once, "a")
    client.acl_setuser("guest", enabled=True, passwords=["+guest"], commands=["+@connection"])
    try:
        login = valkey_server.url.replace("redis://", "redis://guest:{}@")
        wrong = DirectProducer(login.format("wrong"), key_file, application="shop", use_login=False)
        with wrong, pytest.raises(errors.NotConfigured, match="login"):
            wrong.enqueue(once, "a")
        login = login.format("guest")
        guest = DirectProducer(login, key_file, application="shop", retry_for=0.1)
        with guest, pytest.raises(errors.ValkeyRefused, match="permission"):
            guest.enqueue(once, "a")
    finally:
        client.acl_deluser("guest")


async def test_it_logs_in_as_its_application_and_reaches_nothing_else(
    client: redis.Redis, valkey_server: ValkeyServer, key_file: Path
) -> None:
    names = {"user": user_of_jobs(TAG), "password": passwords_of_jobs(KEYS)[0]}
    words = ("ACL", "SETUSER", names["user"], "on", f">{names['password']}", *job_fleet_rights(TAG))
    client.execute_command(*words)  # type: ignore[no-untyped-call]
    try:
        producer = DirectProducer(valkey_server.url, key_file, application="shop", retry_for=5)
        with producer, pytest.raises(errors.ValkeyRefused, match="belongs to the servers"):
            producer.with_options(job_id="early").enqueue(once, "a")
        client.script_load(job_scripts.ENQUEUE.source)  # as orchestrators do
        with DirectProducer(valkey_server.url, key_file, application="shop") as producer:
            sent = producer.enqueue_many(producer.call(once, f"p{number}") for number in range(600))
            assert len(sent) == 600
            with pytest.raises(redis.exceptions.NoPermissionError):
                producer._redis.get(job_keys.meta(job_keys.FLEET_TAG))
    finally:
        client.acl_deluser(names["user"])


def test_what_no_job_can_be_is_refused_before_it_is_sent(producer: DirectProducer) -> None:
    with pytest.raises(errors.InvalidArguments, match=r"args\.visits"):
        producer.enqueue(count, "a", visits="many")  # type: ignore[arg-type]
    with pytest.raises(errors.JobTooLarge, match="64 KiB"):
        producer.enqueue(once, "x" * 66_000)
    with pytest.raises(TypeError, match="names need the API"):
        producer.enqueue("shop/jobs.once", page="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="priority"):
        producer.with_options(priority=10)


def test_a_key_file_that_others_read_or_that_has_no_key_is_refused(key_file: Path) -> None:
    def connect() -> None:
        DirectProducer("redis://127.0.0.1:1", key_file, application="shop", use_login=False)

    key_file.chmod(0o644)
    with pytest.raises(errors.NotConfigured, match="chmod 600"):
        connect()
    key_file.chmod(0o600)
    key_file.write_text("[[1, 2]]")
    with pytest.raises(errors.NotConfigured, match="does not hold the keys"):
        connect()
    key_file.unlink()
    with pytest.raises(errors.NotConfigured, match="cannot read"):
        connect()
    with pytest.raises(errors.NotConfigured, match="an application is"):
        DirectProducer("redis://127.0.0.1:1", key_file, application="Shop!", use_login=False)


def test_the_package_works_without_a_redis_client() -> None:
    code = (
        "import sys; sys.modules['redis'] = None; import infra.berth_jobs.send, "
        "infra.berth_jobs.testing"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
