"""Which files of ours an order, a claim or a job meets: counted in the processes of a real system.

Every process counts the calls of our functions (`hook/sitecustomize.py`). Then something is done
many times. A function that is called at least as often may be on its way. One that is also called
while the system rests may be the upkeep of a loop instead; so a file is surely on the way if one of
its functions rests then.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Seconds. A process writes its counts five times a second, but only while it calls anything: some
#: loops rest for two seconds.
_WRITTEN = 3.0


#: Seconds of rest at least: a worker's session looks around once a second.
_AT_REST = 1.5


@dataclass(frozen=True)
class Traced:
    """The files with a function that was called each time, and those of them where it rested
    otherwise."""

    met: set[str]
    only_by_it: set[str]


class Tracer:
    def __init__(self, hook: Path) -> None:
        self._hook = hook

    def files(self, act: Callable[[], None], *, times: int, of: tuple[str, ...]) -> Traced:
        """The files that each of the `times` things meets that `act` does.

        `of`: modules whose processes are looked at, as they stand behind `python -m`.
        """
        before = self._counts(of)
        began = time.monotonic()
        act()
        lasted = time.monotonic() - began
        time.sleep(_WRITTEN)
        acted = self._counts(of)
        time.sleep(max(lasted, _AT_REST))
        busy, idle = acted - before, self._counts(of) - acted
        often = {key for key, count in busy.items() if count >= times}
        return Traced(
            met={file for file, _ in often}, only_by_it={key[0] for key in often if not idle[key]}
        )

    def _counts(self, of: tuple[str, ...]) -> Counter[tuple[str, str]]:
        counts: Counter[tuple[str, str]] = Counter()
        for path in (self._hook / "counts").glob("*.json"):
            process = json.loads(path.read_text(encoding="utf-8"))
            words = " ".join(process["argv"])
            module = re.search(r"-m ([\w.]+)", words)
            name = module[1] if module else ""
            if name == "api.processes.server":  # one of several
                name = "api"
            if name in of:
                counts.update(
                    {(file, function): count for file, function, count in process["calls"]}
                )
        return counts


@contextmanager
def tracing(folder: Path) -> Iterator[Tracer]:
    """Traces all Python processes that are started within."""
    hook = folder / "hook"
    shutil.copytree(ROOT / "tests" / "ways" / "hook", hook)
    (hook / "counts").mkdir()
    (hook / "root").write_text(str(ROOT), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(hook))
        patch.setenv("BERTH_LOCAL_PASS_ENVIRONMENT", '["PYTHONPATH"]')
        yield Tracer(hook)


def files_of(page: str) -> tuple[set[str], set[str]]:
    """Returns the files that a page of `docs/how-it-works` names: those of its list, and the shared
    ones."""
    text = (ROOT / "docs" / "how-it-works" / page).read_text(encoding="utf-8")
    parts = []
    for name in ("files", "shared"):
        part = text.partition(f"<!-- {name} -->")[2].partition(f"<!-- end of {name} -->")[0]
        parts.append(set(re.findall(r"`(\w+/[\w/]+\.(?:py|lua))`", part)))
    return parts[0], parts[1]
