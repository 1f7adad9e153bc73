"""A worker whose session dies at once: its selector cannot be made."""

from __future__ import annotations

import sys

from worker_runtime.config import read
from worker_runtime.log import Log
from worker_runtime.protocol.exit_codes import ExitCode
from worker_runtime.zygote import Zygote


class BrokenZygote(Zygote):
    def session_main(self) -> ExitCode:
        raise RuntimeError("broken")


if __name__ == "__main__":
    config = read()
    sys.exit(BrokenZygote(config, lambda: None, Log(worker_id=config.worker_id)).run())  # type: ignore[arg-type,return-value]
