"""A worker falls silent and no launcher tells of it: only its mark does, by running out."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from tests.e2e.conftest import House, until
from worker_runtime.protocol import keys


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_worker_that_only_its_mark_gives_away_is_replaced_in_time(house: House) -> None:
    """Within the mark's lifetime + 10 s; another twenty for a busy machine."""
    trader, neighbour = house.trader(), house.trader()
    house.start_until_active(neighbour)
    silent = house.start_until_active(trader)["worker_id"]
    root = psutil.Process(house.worker_pid(silent))
    for process in [root, *root.children(recursive=True)]:
        process.send_signal(signal.SIGSTOP)
    began = time.monotonic()

    def marked_by_another() -> str | None:
        with house.valkey() as client:
            mark = client.get(keys.mark(trader.user_id))
        assert mark is None or isinstance(mark, bytes)
        worker_id = (mark or b"").decode().partition(":")[2]
        return worker_id if worker_id not in ("", silent) else None

    successor = until(marked_by_another, "another worker", patience=90.0)
    took = time.monotonic() - began
    assert took < house.stack.settings.mark_ttl + 30.0, f"replaced after {took:.1f} s"
    assert not root.is_running()
    assert house.start_until_active(trader)["worker_id"] == successor
    [session] = until(
        lambda: found if len(found := house.open_sessions(trader)) == 1 else None, "single session"
    )
    assert successor in session.client
    assert len(house.open_sessions(neighbour)) == 1
