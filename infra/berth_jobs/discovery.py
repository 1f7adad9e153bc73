"""Finds the jobs of a package: by the modules that are named,
or by entry points of the group `berth.jobs`.

`python -m berth_jobs.discovery --application shop --import shop.jobs` prints the manifest as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .declaration import JobFunction, declared_jobs
from .manifest import JobManifest, build_manifest

GROUP = "berth.jobs"


class NoJobsFound(LookupError):
    """No module declares a job. The text says where jobs were looked for."""


def discover(modules: Sequence[str] = ()) -> list[JobFunction[..., Any]]:
    """Imports these modules, or else those of all entry points,
    and returns the jobs that they declare.

    Raises `NoJobsFound`, and whatever an import raises.
    """
    names = list(modules) or entry_points()
    for name in names:
        importlib.import_module(name.partition(":")[0])
    functions = declared_jobs()
    if not functions:
        where = ", ".join(names) or f"the entry points of group {GROUP}, of which there are none"
        raise NoJobsFound(f"no function is decorated with @berth_jobs.job in {where}")
    return functions


def entry_points() -> list[str]:
    """Returns the modules of all entry points of the group, sorted."""
    return sorted({point.value for point in importlib.metadata.entry_points(group=GROUP)})


def manifest_of(application: str, modules: Sequence[str] = ()) -> JobManifest:
    """Discovers the jobs and describes them. Raises what `discover` does, and `BadManifest`."""
    functions = discover(modules)
    names = [function.type.function.__module__ for function in functions]
    distributions = importlib.metadata.packages_distributions()
    packages = {name: _distribution(name, distributions) for name in set(names)}
    # Runners of earlier releases compare this one.
    top = names[0].partition(".")[0]
    first = distributions.get(top, [])[:1]
    package, version = (first[0], importlib.metadata.version(first[0])) if first else (top, "")
    return build_manifest(application, functions, package, version, packages)


def _distribution(module: str, distributions: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """Returns the name and version of the distribution that has a module, else the module's first
    part.

    `distributions`: the first part of a module → distributions with such modules: several of them
    for a namespace.
    """
    top = module.partition(".")[0]
    names = sorted(set(distributions.get(top, ())))
    if not names:
        return top, ""
    file = getattr(sys.modules.get(module), "__file__", None)
    name = next((name for name in names[1:] if _has_file(name, file)), names[0])
    return name, importlib.metadata.version(name)


def _has_file(distribution: str, file: str | None) -> bool:
    """Returns True if a distribution has installed this file."""
    if file is None:
        return False
    installed = importlib.metadata.distribution(distribution)
    return any(str(installed.locate_file(path)) == file for path in installed.files or ())


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the manifest of a package; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m berth_jobs.discovery", description="Print a manifest."
    )
    parser.add_argument("--application", required=True)
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE")
    given = parser.parse_args(arguments)
    sys.stdout.write(
        manifest_of(given.application, given.modules).canonical_bytes().decode() + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
