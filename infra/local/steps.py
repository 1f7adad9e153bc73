"""Steps of a start: each begins when those it needs are done, independent ones run beside each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import StrEnum

from infra.local.process import ServerFailed
from worker_runtime.protocol.errors import BerthError


class StepStatus(StrEnum):
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class StepProgress:
    """One change of one step. `seconds` is what it took (when done or failed)."""

    step: str
    status: StepStatus
    seconds: float = 0.0
    detail: str = ""


#: Called from several threads, with each change.
OnProgress = Callable[[StepProgress], None]


def show_nothing(change: StepProgress) -> None:
    """Shows nothing."""


@dataclass(frozen=True)
class StartStep:
    """`action` blocks until the step is done; what it returns is shown beside it."""

    name: str
    action: Callable[[], str]
    needs: tuple[str, ...] = ()


def as_berth_error(name: str, error: Exception) -> BerthError:
    """The same failure in words for a person: a library's error is named with the part it came from."""
    if isinstance(error, BerthError):
        return error
    first = str(error).strip().partition("\n")[0]
    return ServerFailed(f"{name}: {type(error).__name__}: {first}")


def run_steps(steps: Sequence[StartStep], progress: OnProgress, give_up: Callable[[], None]) -> None:
    """Runs all steps; raises the first failure, after `give_up()` and the end of those under way.

    Whatever a step raises comes as a `BerthError` (see `as_berth_error`).

    `give_up` must make running actions return soon; it is also called on Ctrl-C.
    """
    done: set[str] = set()
    waiting = list(steps)
    running: dict[Future[None], StartStep] = {}
    failure: BaseException | None = None
    with ThreadPoolExecutor(max_workers=len(steps), thread_name_prefix="berth-step") as threads:
        try:
            while waiting or running:
                for step in [s for s in waiting if done.issuperset(s.needs)]:
                    waiting.remove(step)
                    running[threads.submit(_run_step, step, progress)] = step
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    step = running.pop(future)
                    if error := future.exception():
                        failure = failure or error
                        waiting.clear()
                        give_up()
                    else:
                        done.add(step.name)
        except BaseException:  # Ctrl-C: the pool's exit waits for the running steps
            give_up()
            raise
    if failure is not None:
        raise failure


def _run_step(step: StartStep, progress: OnProgress) -> None:
    started = time.monotonic()
    progress(StepProgress(step.name, StepStatus.STARTED))
    try:
        detail = step.action()
    except Exception as error:
        failure = as_berth_error(step.name, error)
        first = failure.detail.partition("\n")[0]
        progress(StepProgress(step.name, StepStatus.FAILED, time.monotonic() - started, first))
        raise failure from error
    progress(StepProgress(step.name, StepStatus.DONE, time.monotonic() - started, detail))
