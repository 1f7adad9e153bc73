"""`python -m tests.replay.record`: plays every scenario on a fresh server and keeps its history.

Run it at a release, when a workflow has new branches: histories of the last release stay (they are
what running workflows were made with), new ones go beside them in a folder named by the release.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowHistory

from infra.local.servers import TemporalServer
from tests.replay.bulk_scenarios import run_bulk
from tests.replay.instrument_scenarios import run_instruments
from tests.replay.order_scenarios import run_orders
from tests.replay.statement_scenarios import run_statements
from tests.replay.worker_scenarios import run_all
from workflows.names import SEARCH_ATTRIBUTES

HISTORIES = Path(__file__).parent / "histories"
#: The folder for new recordings.
RELEASE = "0.1.0"


async def run(address: str) -> dict[str, WorkflowHistory]:
    # An identity of its own: the SDK's default is the name of the machine.
    client = await Client.connect(address, identity="replay")
    histories = await run_all(client) | await run_orders(client) | await run_bulk(client)
    histories |= await run_statements(client)
    histories |= await run_instruments(client)
    await asyncio.sleep(0.1)  # the SDK's core lets go before the loop ends
    return histories


def without_stack_traces(value: Any) -> Any:
    """They hold the recording machine's paths, and a replay does not look at them."""
    if isinstance(value, dict):
        return {
            key: without_stack_traces(item) for key, item in value.items() if key != "stackTrace"
        }
    if isinstance(value, list):
        return [without_stack_traces(item) for item in value]
    return value


def main() -> None:
    folder = HISTORIES / (sys.argv[1] if len(sys.argv) > 1 else RELEASE)
    with (
        tempfile.TemporaryDirectory() as data,
        TemporalServer(Path(data), durable=False, search_attributes=SEARCH_ATTRIBUTES) as server,
    ):
        histories = asyncio.run(run(server.address))
    folder.mkdir(parents=True, exist_ok=True)
    for name, history in histories.items():
        path = folder / f"{name}.json"
        if path.exists():  # what was recorded of a release stays
            continue
        kept = without_stack_traces(json.loads(history.to_json()))
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
