"""A runner's configuration is checked before anything starts."""

from __future__ import annotations

import msgspec
import pytest

from worker_runtime.jobs.config import parse_config
from worker_runtime.process.config import BadConfig

GOOD: dict[str, object] = {
    "message_keys": [[1, "AAAA"]],
    "name": "r",
    "valkey_url": "redis://user:secret@127.0.0.1:6379/0",
}


def test_a_small_configuration_is_enough() -> None:
    config = parse_config(msgspec.json.encode(GOOD))
    assert (config.slots, config.recycle, config.queues) == (1, 1, ("*",))
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"message_keys": []},
        {"queues": []},
        {"slots": 0},
        {"recycle": 0},
        {"lease": 0.5},
        {"valkey_url": "http://secret"},
        {"slots": "many"},
    ],
)
def test_a_wrong_configuration_is_refused_without_quoting_it(change: dict[str, object]) -> None:
    with pytest.raises(BadConfig) as refused:
        parse_config(msgspec.json.encode({**GOOD, **change}))
    assert "secret" not in refused.value.detail
