"""The exchange as a child process, for the local stack, benchmarks and tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from infra.local.servers import HOST, Server, accepts, free_port


class ExchangeServer(Server):
    """A paper exchange of its own; `stop(SIGKILL)` makes it a crash, `start()` starts it again."""

    name = "exchange"

    def __init__(
        self,
        directory: Path,
        port: int | None = None,
        *,
        admin_port: int | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """`options` are further words of its command line, such as `--orders-per-10s 5000`."""
        super().__init__(directory, port)
        self.admin_port = admin_port or free_port()
        self.options = tuple(options)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://{HOST}:{self.admin_port}"

    def command(self) -> Sequence[str]:
        words = [sys.executable, "-m", "infra.exchange", "--host", HOST, "--port", str(self.port)]
        words += ["--admin-port", str(self.admin_port), "--ledger", str(self.directory / "ledger.db")]
        return [*words, *self.options]

    def answers(self) -> bool:
        return accepts(self.port) and accepts(self.admin_port)
