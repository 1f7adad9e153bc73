"""The steps of a start: each begins when the steps it needs are done;
independent ones run in parallel."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import StrEnum
from graphlib import TopologicalSorter

from infra.local.process import ServerFailed, StartAborted
from worker_runtime.protocol.errors import BerthError


class StepStatus(StrEnum):
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"
    #: Given up because another step failed, or because somebody interrupted the start.
    STOPPED = "stopped"


@dataclass(frozen=True)
class StepProgress:
    """A change of a step. `seconds`: how long a done or failed step took."""

    step: str
    status: StepStatus
    seconds: float = 0.0
    detail: str = ""


#: Called with each change, from several threads.
OnProgress = Callable[[StepProgress], None]


@dataclass(frozen=True)
class StartStep:
    """`action` blocks until the step is done; the text it returns is shown next to the step."""

    name: str
    action: Callable[[], str]
    needs: tuple[str, ...] = ()


def as_berth_error(name: str, error: Exception) -> BerthError:
    """Returns the failure in words for people: a library's error with the part that it came
    from."""
    if isinstance(error, BerthError):
        return error
    first = str(error).strip().partition("\n")[0]
    return ServerFailed(f"{name}: {type(error).__name__}: {first}")


def run_steps(
    steps: Sequence[StartStep], progress: OnProgress, give_up: Callable[[], None]
) -> None:
    """Runs all steps. Raises the first failure as a `BerthError`,
    once the running steps have ended.

    `give_up` must make running steps return soon; it is called on a failure and on Ctrl-C.
    """
    order = TopologicalSorter({step.name: step.needs for step in steps})
    order.prepare()
    by_name = {step.name: step for step in steps}
    running: dict[Future[None], str] = {}
    failure: BaseException | None = None
    with ThreadPoolExecutor(max_workers=len(steps), thread_name_prefix="berth-step") as threads:
        try:
            while running or (failure is None and order.is_active()):
                for name in order.get_ready() if failure is None else ():
                    running[threads.submit(_run_step, by_name[name], progress)] = name
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    name = running.pop(future)
                    if error := future.exception():
                        # A step that was given up is never the cause,
                        # even if its end is seen first.
                        if failure is None or isinstance(failure, StartAborted):
                            failure = error
                        give_up()
                    else:
                        order.done(name)
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
    except StartAborted:
        progress(StepProgress(step.name, StepStatus.STOPPED, time.monotonic() - started))
        raise
    except Exception as error:
        failure = as_berth_error(step.name, error)
        first = failure.detail.partition("\n")[0]
        progress(StepProgress(step.name, StepStatus.FAILED, time.monotonic() - started, first))
        raise failure from error
    progress(StepProgress(step.name, StepStatus.DONE, time.monotonic() - started, detail))
