"""Makes the secret files that `compose.yaml` mounts, and `.env`: `python3
infra/compose/secret_files.py`.

Run it once before the first `docker compose up`, and again after a `git pull` under a umask of 077.
Existing files are kept, because the databases already have their passwords. It needs only Python's
standard library.

The folder is 0700 and its files are 0644: on the host nobody else can enter the folder, and in a
container the service's user (with another id than yours) can read the one file that is mounted.
"""

import os
import secrets
import sys
from pathlib import Path

#: Where `compose.yaml` looks for them, relative to the repository.
FOLDER = Path(".secrets")
#: Settings of compose, relative to the repository.
ENVIRONMENT = Path(".env")
#: The folder of what `compose.yaml` mounts next to the secrets.
MOUNTED = Path(__file__).parent
#: Files that an installation of 0.1.0 has not: they are added to it.
ADDED = {"berth_owner_password", "berth_database_owner_url"}


def contents(berth: str, temporal: str, valkey: str, superuser: str, owner: str) -> dict[str, str]:
    """Returns the content of each file by its name, from the five passwords."""
    return {
        "postgres_password": superuser,
        "berth_database_password": berth,
        "temporal_database_password": temporal,
        # Read by `infra.settings` from /run/secrets; the names are those of its variables.
        "berth_database_url": f"postgresql+asyncpg://berth:{berth}@postgres:5432/berth",
        "berth_owner_password": owner,
        "berth_database_owner_url": f"postgresql+asyncpg://berth_owner:{owner}@postgres:5432/berth",
        "berth_valkey_url": f"redis://:{valkey}@valkey:6379/0",
        "valkey_password.conf": f"requirepass {valkey}",
    }


def write(folder: Path) -> list[Path]:
    """Writes all files, or none if they are there; returns those written. Raises OSError.

    Raises FileExistsError if only some are there:
    passwords that belong together would no longer match.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    files = contents(*(secrets.token_hex(24) for _ in range(5)))
    there = [name for name in files if (folder / name).exists()]
    if len(there) == len(files):
        return []
    missing = sorted(set(files) - set(there))
    if there and set(missing) != ADDED:
        raise FileExistsError(
            f"{folder} is incomplete (missing: {', '.join(missing)}); restore it, or remove it "
            "with the volumes"
        )
    written = []
    for name in missing:
        path = folder / name
        path.write_text(files[name] + "\n", encoding="utf-8")
        path.chmod(0o644)
        written.append(path)
    return written


def open_mounted(folder: Path) -> None:
    """Lets the containers' users read what they mount, whatever the clone's umask was. Raises
    OSError."""
    for path in folder.iterdir():
        if path.suffix in (".sh", ".yaml", ".conf"):
            path.chmod(path.stat().st_mode | 0o044)


def choose_profile(file: Path) -> None:
    """Adds to `.env` how workers run, where it does not say it: in containers. Raises OSError.

    With it the group that may use Docker's socket, as the service `launcher` has to.
    """
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if "COMPOSE_PROFILES=" in text:
        return
    engine = Path(os.environ.get("BERTH_DOCKER_SOCKET", "/var/run/docker.sock"))
    lines = ["COMPOSE_PROFILES=containers"]
    if engine.exists():
        lines.append(f"BERTH_DOCKER_GROUP={engine.stat().st_gid}")
    with file.open("a", encoding="utf-8") as opened:
        opened.write("".join(f"{line}\n" for line in lines))


def main() -> int:
    try:
        written = write(FOLDER)
        open_mounted(MOUNTED)
        choose_profile(ENVIRONMENT)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(
        f"{FOLDER}: {len(written)} files written\n" if written else f"{FOLDER}: complete, kept\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
