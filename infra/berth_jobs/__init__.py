"""Declares your own job types for Berth's job runner, and enqueues them.

Begin with the decorator `job` and the function `context`.

Not here: anything of the server. This package is a distribution of its own and imports no other folder.
"""

from .context import JobContext, RetryLater, context
from .declaration import BadDeclaration, DeclaredJob, JobFunction, job

__all__ = ["BadDeclaration", "DeclaredJob", "JobContext", "JobFunction", "RetryLater", "context", "job"]
