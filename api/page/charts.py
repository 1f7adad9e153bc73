"""Pictures for the pages, as numbers that a template writes as SVG."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from api.pools.service import PoolControl
from api.workers.schemas import TransitionView
from worker_runtime.protocol.errors import BerthError
from workflows.worker_pool.messages import PoolView

#: Units of a picture's width.
CHART_WIDTH = 1000.0
#: Units of a state's width: one that was short is drawn this wide, so that it is seen.
MIN_SPAN_WIDTH = 6.0


@dataclass(frozen=True, slots=True)
class StateSpan:
    """Describes a state of a worker in its timeline. `x` and `width` are units of the picture."""

    x: float
    width: float
    state: str
    began: datetime
    seconds: float
    reason: str


def timeline_spans(transitions: Sequence[TransitionView]) -> list[StateSpan]:
    """Returns the states of a worker from its first shown change until now, side by side.

    Widths follow the time; the narrowest ones are widened, and the others give what that takes.
    """
    if not transitions:
        return []
    ends = [
        *(transition.at for transition in transitions[1:]),
        max(datetime.now(UTC), transitions[-1].at),
    ]
    times = [
        max(0.0, (end - transition.at).total_seconds())
        for transition, end in zip(transitions, ends, strict=True)
    ]
    least = min(MIN_SPAN_WIDTH, CHART_WIDTH / len(times))
    scale = (CHART_WIDTH - least * len(times)) / (sum(times) or 1.0)
    spans, x = [], 0.0
    for transition, seconds in zip(transitions, times, strict=True):
        width = least + seconds * scale
        spans.append(
            StateSpan(
                round(x, 1),
                round(width, 1),
                transition.after,
                transition.at,
                seconds,
                transition.reason,
            )
        )
        x += width
    return spans


#: Seconds between two samples of a pool.
SAMPLE_INTERVAL_S = 30.0
#: Samples that are kept of a pool: an hour of them.
MAX_SAMPLES_PER_POOL = 120
#: Pools that a process samples: one query each.
MAX_SAMPLED_POOLS = 20
#: The figures that are sampled, as the chart's lines.
LINES = ("wanted", "ready", "starting", "in_use")


class PoolHistory:
    """The last hour of the pools that somebody looked at, as this process has seen it."""

    def __init__(self, pools: PoolControl, pool: str, max_pools: int = MAX_SAMPLED_POOLS) -> None:
        """Watches `pool` from the start, and at most `max_pools` pools."""
        self._pools, self._most = pools, max_pools
        self._samples: dict[str, deque[tuple[datetime, PoolView]]] = {
            pool: deque(maxlen=MAX_SAMPLES_PER_POOL)
        }

    async def samples_of(self, pool: str) -> Sequence[tuple[datetime, PoolView]]:
        """Returns the samples, oldest first. From now on the pool is watched, if it exists and
        there is room."""
        if pool not in self._samples and len(self._samples) < self._most:
            with suppress(BerthError):  # no such pool, or nobody answers
                first = datetime.now(UTC), await self._pools.view(pool)
                self._samples.setdefault(pool, deque([first], maxlen=MAX_SAMPLES_PER_POOL))
        return list(self._samples.get(pool, ()))

    async def run(self) -> None:
        """Takes samples forever; while Temporal is away, the chart has a gap."""
        while True:
            for pool, samples in list(self._samples.items()):
                try:
                    samples.append((datetime.now(UTC), await self._pools.view(pool)))
                except BerthError:  # no such pool yet, or nobody answers
                    continue
            await asyncio.sleep(SAMPLE_INTERVAL_S)


def pool_lines(samples: Sequence[tuple[datetime, PoolView]]) -> dict[str, str]:
    """Returns the points of each line, `x,y` from the oldest sample to the latest; y grows
    downwards to
    100."""
    if not samples:
        return {}
    began = samples[0][0]
    length = (samples[-1][0] - began).total_seconds() or 1.0
    top = max(getattr(view, line) for _, view in samples for line in LINES) or 1
    return {
        line: " ".join(
            f"{(at - began).total_seconds() / length * CHART_WIDTH:.0f},"
            f"{100 - getattr(view, line) / top * 96:.0f}"
            for at, view in samples
        )
        for line in LINES
    }
