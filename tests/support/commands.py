"""`berth …` as a process of its own, forked from one that has the command line's modules already.

Started from nothing, each command spends 0.3 s of CPU on imports, and tests run 130 of them. Tests
of the program itself (its signals, what it imports) start it by its name instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

ROOT = Path(__file__).resolve().parents[2]
#: What every command finds in its environment, and nothing of the caller's.
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "NO_COLOR": "1"}


class Finished(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class CommandForker:
    """Runs one command at a time. May be called by several threads."""

    def __enter__(self) -> Self:
        self._turn = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.support.commands import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            cwd=ROOT,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()  # closes its input, which ends it

    def run(self, *words: str, **environment: str) -> Finished:
        """Runs `berth` with these words. `environment`: more variables."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._turn:
            self._process.stdin.write(json.dumps([words, {**ENVIRONMENT, **environment}]) + "\n")
            self._process.stdin.flush()
            return Finished(*json.loads(self._process.stdout.readline()))


def _fork(words: list[str], environment: Mapping[str, str]) -> Finished:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if not pid:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.environ.clear()
            os.environ.update(environment)
            os._exit(_main(words))
        _, status = os.waitpid(pid, 0)
        written = []
        for file in (out, err):
            file.seek(0)
            written.append(file.read().decode())
        return Finished(os.waitstatus_to_exitcode(status), *written)


def _main(words: list[str]) -> int:
    """The program `berth`, up to its exit code."""
    from infra.cli.app import main

    sys.argv = ["berth", *words]
    try:
        main()
        code: object = 0
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):  # as the interpreter does
            sys.stderr.write(f"{code}\n")
    except BaseException:  # the boundary of the process
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 0 if code is None else 1


def serve() -> None:
    """Reads a command a line, and answers with how it ended, until its input ends."""
    # With what commands import when they run.
    import httpx  # noqa: F401
    import typer.rich_utils  # noqa: F401

    import infra.cli.app
    import infra.cli.rest
    import infra.database.migrate  # with the database's client: 0.8 s
    import infra.jobs.applications
    import infra.local.stack
    import infra.settings  # noqa: F401

    for line in sys.stdin:
        sys.stdout.write(json.dumps(_fork(*json.loads(line))) + "\n")
        sys.stdout.flush()
