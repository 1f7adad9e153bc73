"""Ends all workers of a node gracefully: `python -m infra.compose.drain SOCKET`.

A node that stops leaves its workers running, for the next node to adopt. In a container there is no next
one: when its first process ends, the kernel kills the rest in the middle of their orders. So compose runs
this before it stops the container.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from infra.launchers.process import ProcessLauncher
from worker_runtime.protocol.errors import BerthError


def main(arguments: list[str]) -> int:
    try:
        count = asyncio.run(ProcessLauncher(Path(arguments[0])).stop_all("the node's container stops"))
    except BerthError as error:
        sys.stderr.write(f"drain {arguments[0]}: {error}\n")
        return 1
    sys.stdout.write(f"{count} workers stopped\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
