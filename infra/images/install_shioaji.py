"""Installs Shioaji, the broker's SDK: `install_shioaji.py [fallback|pinned|none] [options of pip]`.

`requirements-shioaji.lock` pins it by hash. Its publisher keeps only the two latest patch
releases of each line on PyPI, so one day the index no longer has the pinned one. Then
`fallback`, the default, installs the newest release that `pyproject.toml` allows, without a
hash, and nothing if there is none: all but real trading works without the SDK. `pinned` fails
instead. `none` installs nothing.

Any other failure of pip (no network, a wrong hash, a full disk) is an error. Standard library only:
images run it before anything of Berth is installed. It reads `pyproject.toml` and the lock in the
working directory.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MODES = ("fallback", "pinned", "none")
LOCK = Path("requirements-shioaji.lock")
KEEP_A_COPY = 'docs/how-to/containers.md, "Shioaji\'s wheel", says how to keep a copy.'


class NotOnIndex(Exception):
    """The index answers, and has no such release for this Python and platform."""


class PipFailed(Exception):
    """Anything else."""


def requirement(pyproject: Path = Path("pyproject.toml")) -> str:
    """Returns what `pyproject.toml` allows, such as `shioaji>=1.7.9,<1.8`."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    (line,) = project["optional-dependencies"]["shioaji"]
    return str(line)


def install(words: Sequence[str], options: Sequence[str]) -> None:
    """Runs pip. Raises `NotOnIndex` or `PipFailed`."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "pip.log")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        done = subprocess.run(
            [*pip, "--log", log, *options, *words], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return
        said = done.stderr.strip()
        details = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    # pip ends with the same sentence whether the index
    # has no release or cannot be reached; its log tells.
    unfetched: list[str] = re.findall(r"Could not fetch URL .*", details)
    unreached = [line for line in unfetched if "404 Client Error" not in line]
    if "No matching distribution found for shioaji" in said and not unreached:
        raise NotOnIndex(said)
    raise PipFailed("\n".join([said, *unreached[:1]]))


def installed() -> str:
    try:
        return version("shioaji")
    except PackageNotFoundError:
        return ""


def say(text: str) -> None:
    line = "!" * 100
    sys.stderr.write(f"{line}\n{text}\n{line}\n")


def install_or_fall_back(mode: str, options: Sequence[str]) -> int:
    """Returns the exit code."""
    [pinned] = re.findall(r"^shioaji==(\S+)", LOCK.read_text(encoding="utf-8"), re.M)
    allowed = requirement()
    try:
        install(["--require-hashes", "-r", str(LOCK)], options)
        return 0
    except NotOnIndex:
        if mode == "pinned":
            say(
                f"SHIOAJI: the package index has no shioaji {pinned}, which {LOCK} "
                f"pins.\n{KEEP_A_COPY}"
            )
            return 1
    try:
        install([allowed], options)
    except NotOnIndex:
        say(
            f"SHIOAJI: NOT INSTALLED. The package index has neither shioaji {pinned}, which "
            f"{LOCK} pins,\n"
            f"nor another release of {allowed} for this machine. Paper trading works without it.\n"
            f"{KEEP_A_COPY}"
        )
        return 0
    say(
        f"SHIOAJI: {installed()} IS INSTALLED WITHOUT A HASH, IN PLACE OF {pinned}, which "
        f"{LOCK} pins and\n"
        "the package index no longer has. Try it in the broker's simulation before you trade "
        "with it.\n"
        f"{KEEP_A_COPY}"
    )
    return 0


def main(arguments: Sequence[str]) -> int:
    mode, options = "fallback", list(arguments)
    if options and options[0] in MODES:
        mode = options.pop(0)
    if mode == "none":
        return 0
    try:
        return install_or_fall_back(mode, options)
    except PipFailed as failed:
        sys.stderr.write(f"error: Shioaji could not be installed.\n{failed}\n")
        sys.stderr.write(
            "Try again, or leave it out for paper trading only: make setup SHIOAJI=none\n"
        )
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
