"""A worker whose session dies at once: its selector cannot be made."""

from __future__ import annotations

import sys

from worker_runtime.process.config import read_config
from worker_runtime.process.log import Log
from worker_runtime.protocol.launch import ExitCode
from worker_runtime.zygote import Zygote


class BrokenZygote(Zygote):
    def session_main(self) -> ExitCode:
        raise RuntimeError("broken")


if __name__ == "__main__":
    config = read_config()
    sys.exit(BrokenZygote(config, lambda: None, Log(worker_id=config.worker_id)).run())  # type: ignore[arg-type,return-value]
