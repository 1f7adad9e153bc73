"""Gives processes of the API another clock: Python imports a hook when they start.

Each new process reads from a file by how many seconds its clock is off. So a process is killed to
get another clock, and the one that follows it after another kill has the right one again.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from infra.lab.processes import send_signal

#: Seconds: what a host without time synchronization is off after a month or two.
CLOCK_OFFSET_S = 600

#: The types of the C modules are changed in place, because others ask for them by name. Without the
#: offset's file, and in all other processes, the hook does nothing.
_HOOK = """
import os, pathlib, sys
FILE = pathlib.Path({file!r})
if "api.processes.server" in sys.orig_argv and FILE.exists():
    import ctypes, datetime, gc, time
    off = int(FILE.read_text())
    FILE.unlink()
    now, clock, clock_ns = datetime.datetime.now, time.time, time.time_ns
    found = gc.get_referents(datetime.datetime.__dict__)[0]
    found["now"] = classmethod(lambda cls, tz=None: now(tz) + datetime.timedelta(seconds=off))
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
    time.time = lambda: clock() + off
    time.time_ns = lambda: clock_ns() + off * 1_000_000_000
    print(f"the clock of this process is {{off}} s off", file=sys.stderr, flush=True)
"""


class ApiClock:
    """Made by `installed`, around the start of the stack."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "off"

    @classmethod
    @contextmanager
    def installed(cls) -> Iterator[Self]:
        """Installs the hook for processes that are started in the block."""
        before = os.environ.get("PYTHONPATH")
        with TemporaryDirectory(prefix="berth-clock-") as folder:
            clock = cls(Path(folder))
            Path(folder, "sitecustomize.py").write_text(_HOOK.format(file=str(clock._file)))
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, before)))
            try:
                yield clock
            finally:
                del os.environ["PYTHONPATH"]
                os.environ |= {} if before is None else {"PYTHONPATH": before}

    def skew(self, pids: Sequence[int], lot: float) -> bool:
        """Kills one of these processes; the one that takes its place is ahead or behind."""
        if not pids:
            return False
        half = lot * 2
        self._file.write_text(str(CLOCK_OFFSET_S if half < 1.0 else -CLOCK_OFFSET_S))
        send_signal(signal.SIGKILL, pids[int(half % 1.0 * len(pids))])
        return True
