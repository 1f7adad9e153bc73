"""Declares your own job types for Berth's job runner, and enqueues them.

Begin with the decorator `job` and the function `context`; enqueue with `send`, `Producer` or
`AsyncProducer`, and test with `testing`.

Not here: anything of the server.
This package is a distribution of its own and imports no other folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .context import JobContext, RetryLater, context
from .declaration import BadDeclaration, DeclaredJob, JobFunction, job

if TYPE_CHECKING:
    from .send import AsyncProducer, Producer

__all__ = [
    "AsyncProducer",
    "BadDeclaration",
    "DeclaredJob",
    "JobContext",
    "JobFunction",
    "Producer",
    "RetryLater",
    "context",
    "job",
]


def __getattr__(name: str) -> Any:
    """Import the producers when they are first used:
    a process that runs jobs needs no HTTP client."""
    if name in ("AsyncProducer", "Producer"):
        from . import send

        return getattr(send, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
