"""Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping

from worker_runtime.protocol.job_metrics import BOUNDS_MS

#: What a scraper is told that this is.
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


class Page:
    """Lines of one answer: a family's head, then its samples."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, about: str) -> None:
        self._lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]

    def sample(self, name: str, labels: Labels, value: float) -> None:
        shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
        self._lines.append(f"{name}{{{shown}}} {value:.15g}" if shown else f"{name} {value:.15g}")

    def histogram(self, name: str, labels: Labels, numbers: Mapping[str, int]) -> None:
        """`numbers` by bucket, and the `sum` in ms; told in seconds."""
        total = 0
        for index, bound in enumerate(BOUNDS_MS):
            total += numbers.get(str(index), 0)
            self.sample(f"{name}_bucket", (*labels, ("le", f"{bound / 1000:g}")), total)
        total += numbers.get(str(len(BOUNDS_MS)), 0)
        self.sample(f"{name}_bucket", (*labels, ("le", "+Inf")), total)
        self.sample(f"{name}_sum", labels, numbers.get("sum", 0) / 1000)
        self.sample(f"{name}_count", labels, total)

    def text(self) -> str:
        return "\n".join([*self._lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
