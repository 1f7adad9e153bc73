"""A worker stands still, and no launcher reports it: only its mark gives it away, by running
out."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from tests.support.chaos.system import MARK_TTL, ChaosSystem
from tests.support.systems.local import until
from worker_runtime.protocol import keys


@pytest.mark.drill
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_worker_that_only_its_mark_gives_away_is_replaced_in_time(
    chaos_system: ChaosSystem,
) -> None:
    """Within the mark's lifetime + 10 s; another twenty for a busy machine."""
    system, neighbour = chaos_system.system, chaos_system.bystanders[0]
    trader = system.trader()
    silent = system.start_until_active(trader)["worker_id"]
    root = psutil.Process(system.worker_pid(silent))
    for process in [root, *root.children(recursive=True)]:
        process.send_signal(signal.SIGSTOP)
    began = time.monotonic()

    def marked_by_another() -> str | None:
        with system.valkey() as client:
            mark = client.get(keys.mark(trader.user_id))
        assert mark is None or isinstance(mark, bytes)
        worker_id = (mark or b"").decode().partition(":")[2]
        return worker_id if worker_id not in ("", silent) else None

    successor = until(marked_by_another, "another worker", patience=90.0)
    took = time.monotonic() - began
    assert took < MARK_TTL + 30.0, f"replaced after {took:.1f} s"
    assert not root.is_running()
    assert system.start_until_active(trader)["worker_id"] == successor
    [session] = until(
        lambda: sessions if len(sessions := system.open_sessions(trader)) == 1 else None,
        "single session",
    )
    assert successor in session.client
    assert len(system.open_sessions(neighbour)) == 1
