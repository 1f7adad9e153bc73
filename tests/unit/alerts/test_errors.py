"""A process collects the errors that it logs, without their values."""

from __future__ import annotations

import json
import subprocess
import sys

_SCRIPT = """
import json, logging, structlog
from infra.log import configure_log
from infra.alerts.errors import MAX_WAITING_ERRORS, collector
configure_log("info")
collector.service = "api"
log = structlog.get_logger()
def fail():
    raise ValueError("canary-secret")
for _ in range(3):
    try:
        fail()
    except ValueError:
        log.exception("loop_failed", loop="Relay.run", payload="canary-order", path="/canary")
log.warning("only_a_warning")
try:
    fail()
except ValueError as error:
    log.error("crashed", exc_info=error)
log.error("refused", reason="redis://berth:canary-secret@host:1/0 is away")
log.error("canary text with values")
logging.getLogger("temporalio.workflow").error("pool_refilling_stopped", extra={"pool": "a"})
logging.getLogger("some.library").error("%s failed", "canary-payload")
try:
    fail()
except ValueError:
    logging.getLogger("asyncio").exception("canary in a text")
counts = {text: count for (_, text), count in collector.take().items()}
for number in range(1000):
    log.error("flood", order_id=str(number))
print(json.dumps([counts, len(collector.take()), MAX_WAITING_ERRORS]))
"""


def test_errors_are_counted_without_what_they_may_quote() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=30
    )
    counts, waiting, max_waiting = json.loads(done.stdout)
    assert "canary" not in json.dumps(counts)
    events = {text.split(" in api on ")[0]: (text, count) for text, count in counts.items()}
    assert set(events) == {
        "loop_failed",
        "crashed",
        "refused",
        "error",
        "pool_refilling_stopped",
        "some.library",
        "asyncio",
    }
    text, count = events["loop_failed"]
    assert count == 3
    assert text.endswith(", error=ValueError, where=<string>:9, loop=Relay.run")
    assert events["refused"][0].endswith(", reason=redis://host:1/0 is away")
    assert events["pool_refilling_stopped"][0].endswith(", pool=a")
    assert events["asyncio"][0].endswith(", error=ValueError, where=<string>:9")
    assert waiting == max_waiting
