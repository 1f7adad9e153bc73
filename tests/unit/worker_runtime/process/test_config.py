from __future__ import annotations

import json
import os
from typing import Any

import msgspec
import pytest

from tests.support.workers.launch_config import CONFIG
from worker_runtime.process.clock import Backoff
from worker_runtime.process.config import BadConfig, parse_config
from worker_runtime.process.log import Log
from worker_runtime.process.valkey import BadValkeyAddress, ValkeyAddress


def test_a_configuration_survives_its_encoding() -> None:
    assert parse_config(msgspec.json.encode(CONFIG)) == CONFIG


@pytest.mark.parametrize(
    "change",
    [
        {"worker_id": ""},
        {"pool": ""},
        {"orchestrator_keys": (b"short",)},
        {"orchestrator_keys": ()},
        {"mark_period": 0.0},
        {"mark_period": 26.0},
        {"valkey_url": "rediss://h?ssl_ca_certs=/nowhere.pem"},
    ],
)
def test_a_configuration_that_cannot_work_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadConfig):
        parse_config(msgspec.json.encode(msgspec.structs.replace(CONFIG, **change)))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"worker_id": 5}'])
def test_bytes_that_are_not_a_configuration_are_refused(data: bytes) -> None:
    with pytest.raises(BadConfig):
        parse_config(data)


def test_addresses_of_both_kinds_are_read() -> None:
    unix = ValkeyAddress("unix:///run/valkey.sock?db=2")
    assert (unix.target, unix.greeting()) == ("/run/valkey.sock", [("SELECT", 2)])
    tcp = ValkeyAddress("redis://:p%40ss@example.test:6380/3")
    assert (tcp.target, tcp.greeting()) == (
        ("example.test", 6380),
        [("AUTH", "p@ss"), ("SELECT", 3)],
    )
    assert ValkeyAddress("redis://user:pw@h").greeting() == [("AUTH", "user", "pw")]
    assert ValkeyAddress("redis://h").target == ("h", 6379)


@pytest.mark.parametrize("url", ["http://h", "rediss://h/x", "redis://h/x", "h:6379"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(BadValkeyAddress):
        ValkeyAddress(url)


def test_a_log_line_is_one_json_object_with_its_bound_fields() -> None:
    reader, writer = os.pipe()
    log = Log("INFO", output=writer, worker_id="w1").bind(process="session")
    log.debug("unseen")
    log.info("seen", count=3)
    os.close(writer)
    with os.fdopen(reader) as file:
        (line,) = file.readlines()
    entry = json.loads(line)
    assert (entry["event"], entry["worker_id"], entry["process"], entry["count"]) == (
        "seen",
        "w1",
        "session",
        3,
    )


def test_a_crash_is_logged_with_its_place_and_without_its_text() -> None:
    reader, writer = os.pipe()
    try:
        raise ValueError("canary")
    except ValueError as error:
        Log("INFO", output=writer).crash("broke", error)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    assert "canary" not in text
    assert "test_config.py" in text


def test_a_log_that_nobody_reads_raises_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    Log("INFO", output=writer).info("unread")
    os.close(writer)
    assert not os.path.exists(f"/proc/self/fd/{writer}")


def test_waits_grow_to_a_limit_and_start_again() -> None:
    backoff = Backoff(1000.0, 4000.0)
    assert backoff.due()
    waits = []
    for _ in range(5):
        backoff.failed()
        waits.append(backoff.seconds_until_due())
    assert 400 < waits[0] <= 1000
    assert 1900 < waits[4] <= 4000
    assert not backoff.due()
    backoff.reset()
    assert backoff.due()
