"""Builds the image of a user's worker where no image can be pulled: `python -m
infra.lab.worker_image`.

1. A base image of Debian's smallest system with Python, made by debootstrap from the package source
   that this machine's apt uses, and imported.
2. Wheels of what a worker needs, from where this machine's pip gets packages.
3. `docker build` of `worker.Dockerfile` with both, without a network.

Base and wheels are kept in a cache folder,
by the names of what they depend on; the next build takes seconds.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from infra.images.requirements import LOCKS, pinned, read_locks, wanted
from worker_runtime.protocol.errors import BerthError

ROOT = Path(__file__).parents[2]
_RUNTIME = ROOT / "worker_runtime"
#: The packages that the base has in addition to Debian's required ones.
PACKAGES = ("python3", "python3-venv", "ca-certificates")
#: Not needed in an image, and two thirds of its size.
_DROPPED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "var/lib/apt/lists",
)
#: Whose failure is the build's; that of the others is a lack of packages.
_OURS = ("docker", "tar")
#: The mode of the container's root folder, which the worker's user has to enter.
_ROOT_MODE = "755"
#: Seconds of one step. On 2 idle cores debootstrap takes 50, a build without the SDK 10.
_STEP_TIMEOUT_S = 200.0
#: Built images that the cache keeps, 145 MB each.
MAX_KEPT_IMAGES = 3
_BUILD_PROGRAMS = ("docker", "debootstrap", "apt-get")


class ImageNotBuilt(BerthError, code="IMAGE_NOT_BUILT"):
    """The worker's image could not be built here."""


class PackagesAbsent(ImageNotBuilt, code="PACKAGES_ABSENT"):
    """This machine cannot get the packages that the image is made of."""


def why_not_buildable() -> str:
    """Returns what is missing on this machine for a build; empty when nothing is."""
    missing = [name for name in _BUILD_PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "debootstrap needs root"


def cache_folder() -> Path:
    """Returns `BERTH_IMAGE_CACHE`, or a folder in this user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("BERTH_IMAGE_CACHE") or Path(home) / "berth" / "images")


class ImageBuilder:
    """Builds for the daemon at `docker_host`. Several may share a cache, also at the same time."""

    def __init__(self, docker_host: str = "", cache: Path | None = None) -> None:
        # BuildKit is a plugin, often absent.
        self._environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
        if docker_host:
            self._environment["DOCKER_HOST"] = docker_host
        self._cache = cache or cache_folder()
        self._cache.mkdir(parents=True, exist_ok=True)

    def provide(self, tag: str, extras: Sequence[str] = ()) -> None:
        """Provides an image like `build`, but loads one of the same sources from the cache: for
        tests, in 2 s."""
        sources = sorted(
            path for kind in ("py", "lua", "toml", "json") for path in _RUNTIME.rglob(f"*.{kind}")
        )
        files = [
            ROOT / "infra/images/worker.Dockerfile",
            *(ROOT / name for name in LOCKS),
            *sources,
        ]
        digest = _digest(
            tag,
            self.archive().name,
            *extras,
            *(f"{path}:{path.read_text(encoding='utf-8')}" for path in files),
        )
        archive = self._cache / f"worker-{digest}.tar"
        with _locked(archive):
            if archive.exists():
                self._run("docker", "load", "--quiet", "--input", str(archive))
                return
            self.build(tag, extras)
            made = archive.with_suffix(".new")
            self._run("docker", "save", "--output", str(made), tag)
            for older in sorted(self._cache.glob("worker-*.tar"), key=_age)[MAX_KEPT_IMAGES - 1 :]:
                older.unlink(missing_ok=True)
            made.replace(archive)

    def build(self, tag: str, extras: Sequence[str] = ("shioaji",)) -> None:
        """Builds the worker's image. Raises `ImageNotBuilt`."""
        base = self.base()
        with tempfile.TemporaryDirectory(prefix="berth-image-") as folder:
            context = Path(folder)
            for name in ("pyproject.toml", *LOCKS):
                shutil.copy(ROOT / name, context)
            images = context / "infra" / "images"
            images.mkdir(parents=True)
            for name in ("requirements.py", "install_shioaji.py", "worker.Dockerfile"):
                shutil.copy(ROOT / "infra" / "images" / name, images)
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(_RUNTIME, context / "worker_runtime", ignore=ignored)
            shutil.copytree(self.wheels(extras), images / "wheels")
            arguments = {
                "BASE_IMAGE": base,
                "EXTRAS": " ".join(extras),
                "PIP_OPTIONS": "--no-index --find-links=/src",
            }
            given = [
                word
                for name, value in arguments.items()
                for word in ("--build-arg", f"{name}={value}")
            ]
            file = str(images / "worker.Dockerfile")
            self._run(
                "docker",
                "build",
                "--quiet",
                "--network=none",
                "-t",
                tag,
                "-f",
                file,
                *given,
                folder,
            )

    def archive(self) -> Path:
        """Returns the archive of the base image, made if it is not in the cache. Needs no
        daemon."""
        suite, mirror = self._apt_source()
        archive = (
            self._cache / f"base-{suite}-{_digest(mirror, *PACKAGES, *_DROPPED, _ROOT_MODE)}.tar"
        )
        with _locked(archive):
            if not archive.exists():
                self._bootstrap(suite, mirror, archive)
        return archive

    def base(self) -> str:
        """Returns the name of the base image, imported into the daemon if it was not there."""
        archive = self.archive()
        tag = f"berth-base:{archive.stem.removeprefix('base-')}"
        if not self._output("docker", "images", "--quiet", tag).strip():
            self._run("docker", "import", str(archive), tag)
        return tag

    def _apt_source(self) -> tuple[str, str]:
        """Returns suite and address of the Debian archive that apt uses here."""
        fields = "$(CODENAME) $(COMPONENT) $(ORIGIN) $(SITE)"
        targets = self._output(
            "apt-get", "indextargets", "--format", fields, "Created-By: Packages"
        )
        for line in targets.splitlines():
            codename, component, origin, *site = line.split(" ")
            if component == "main" and origin == "Debian" and codename.isalpha() and site:
                return codename, site[0].rstrip("/")
        raise PackagesAbsent(
            "apt has no source of Debian's archive here: has `apt-get update` been run?"
        )

    def _bootstrap(self, suite: str, mirror: str, archive: Path) -> None:
        folder = Path(tempfile.mkdtemp(prefix="base-", dir=self._cache))
        folder.chmod(int(_ROOT_MODE, 8))
        try:
            options = ["--variant=minbase", f"--include={','.join(PACKAGES)}"]
            self._run("debootstrap", *options, suite, str(folder), mirror)
            for name in _DROPPED:
                shutil.rmtree(folder / name, ignore_errors=True)
            for package in (folder / "var/cache/apt/archives").glob("*.deb"):
                package.unlink()
            made = archive.with_suffix(".new")
            self._run("tar", "--numeric-owner", "-C", str(folder), "-cf", str(made), ".")
            made.replace(archive)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def wheels(self, extras: Sequence[str]) -> Path:
        """Returns a folder with what these extras of `pyproject.toml` need; a name that is no extra
        is a package."""
        lines = wanted(ROOT / "pyproject.toml", list(extras))
        entries = pinned(read_locks(ROOT), lines)
        folder = self._cache / f"wheels-{_digest('pinned', entries)}"
        with _locked(folder):
            if not folder.exists():
                made = Path(tempfile.mkdtemp(prefix="wheels-", dir=self._cache))
                pip = [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--quiet",
                    "--disable-pip-version-check",
                ]
                target = [
                    "--only-binary",
                    ":all:",
                    "--python-version",
                    self._python(),
                    "--dest",
                    str(made),
                ]
                # Exactly what the image asks for: it takes what the lock names below a package,
                # whether the package needs it always or for an extra of its own.
                listed = made / "requirements.txt"
                listed.write_text(entries, encoding="utf-8")
                self._run(*pip, *target, "--require-hashes", "--requirement", str(listed))
                listed.unlink()
                made.chmod(0o755)
                made.rename(folder)
        return folder

    def _python(self) -> str:
        """Returns the version of the base's Python, such as 3.11."""
        script = "import sys; print('%d.%d' % sys.version_info[:2])"
        return self._output(
            "docker", "run", "--rm", "--network=none", self.base(), "python3", "-c", script
        ).strip()

    def _run(self, *words: str) -> None:
        self._output(*words)

    def _output(self, *words: str) -> str:
        kind = ImageNotBuilt if words[0] in _OURS else PackagesAbsent
        try:
            done = subprocess.run(
                words,
                env=self._environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=_STEP_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise kind(f"{words[0]}: {error}") from None
        if done.returncode:
            raise kind(f"{' '.join(words[:3])}: {(done.stderr or done.stdout)[-2000:]}")
        return done.stdout


def _age(path: Path) -> float:
    return -path.stat().st_mtime


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.with_name(f"{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.lab.worker_image", description=__doc__)
    parser.add_argument("--tag", default="berth-worker:0.1.0")
    parser.add_argument(
        "--prepare", action="store_true", help="make the base only, without a daemon"
    )
    parser.add_argument("--extras", nargs="*", default=["shioaji"], help="extras of pyproject.toml")
    options = parser.parse_args()
    reason = why_not_buildable()
    try:
        if reason:
            raise ImageNotBuilt(reason)
        if options.prepare:
            sys.stdout.write(f"base image: {ImageBuilder().archive()}\n")
            return 0
        ImageBuilder().build(options.tag, options.extras)
    except BerthError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{options.tag}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
