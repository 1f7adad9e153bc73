"""Makes the secret files that `compose.yaml` mounts: `python3 infra/compose/secret_files.py`.

Run it once before the first `docker compose up`. Existing files are kept, because the databases already have
their passwords. It needs only Python's standard library.

The folder is 0700 and its files are 0644: on the host nobody else can enter the folder, and in a container
the service's user (with another id than yours) can read the one file that is mounted.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

#: Where `compose.yaml` looks for them, relative to the repository.
FOLDER = Path(".secrets")


def contents(berth: str, temporal: str, valkey: str, superuser: str) -> dict[str, str]:
    """File name → content, from the four passwords."""
    return {
        "postgres_password": superuser,
        "berth_database_password": berth,
        "temporal_database_password": temporal,
        # Read by `infra.settings` from /run/secrets; the names are those of its variables.
        "berth_database_url": f"postgresql+asyncpg://berth:{berth}@postgres:5432/berth",
        "berth_valkey_url": f"redis://:{valkey}@valkey:6379/0",
        "valkey_password.conf": f"requirepass {valkey}",
    }


def write(folder: Path) -> list[Path]:
    """Writes all files, or none if they are there; returns those written. Raises OSError.

    Raises FileExistsError if only some are there: passwords that belong together would no longer match.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    files = contents(*(secrets.token_hex(24) for _ in range(4)))
    there = [name for name in files if (folder / name).exists()]
    if len(there) == len(files):
        return []
    if there:
        missing = ", ".join(sorted(set(files) - set(there)))
        raise FileExistsError(
            f"{folder} is incomplete (missing: {missing}); restore it, or remove it with the volumes"
        )
    written = []
    for name, text in files.items():
        path = folder / name
        path.write_text(text + "\n", encoding="utf-8")
        path.chmod(0o644)
        written.append(path)
    return written


def main() -> int:
    try:
        written = write(FOLDER)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(
        f"{FOLDER}: {len(written)} files written\n" if written else f"{FOLDER}: complete, kept\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
