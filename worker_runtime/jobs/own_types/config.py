"""The part of a runner's configuration that is about an application's own types."""

from typing import Annotated

import msgspec


class OwnTypesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Says whose types a runner runs, and what their processes are given."""

    application: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9-]{0,31}\Z")]
    #: Modules with jobs; empty: those of all entry points of the group `berth.jobs`.
    modules: tuple[str, ...] = ()
    #: Folders that are searched for modules first.
    path: tuple[str, ...] = ()
    #: The deployment's defaults of jobs (`berth_jobs.options.JobDefaults`), for the handlers of
    #: failures, which runners enqueue. A dict, since other runners do not have that package.
    defaults: dict[str, int | float] = {}
    #: The user and group of the processes, where the runner is root; 0: one for each application.
    uid: Annotated[int, msgspec.Meta(ge=0)] = 0
    gid: Annotated[int, msgspec.Meta(ge=0)] = 0
    #: Folders and files that no job reaches, such as those of keys (where the kernel has Landlock).
    hidden: tuple[str, ...] = ()
    #: Files and folders with keys: hidden from the jobs, too, if they share the runner's user.
    key_files: tuple[str, ...] = ()
    #: Each goes to the jobs whose type names it.
    secrets: dict[str, str] = {}
    #: Added to the environment of the processes; nothing here is secret.
    environment: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"OwnTypesConfig(application={self.application!r})"
