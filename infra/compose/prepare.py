"""What has to be there before the servers start: `python -m infra.compose.prepare`.

Key files, the tables of the database, and an administrator's API key beside the private keys. Safe to
repeat: existing keys are kept, and a migrated database is left alone.
"""

from __future__ import annotations

import asyncio
import sys

from infra.database.migrate import migrate
from infra.local import keyring
from infra.settings import Settings
from worker_runtime.protocol.errors import BerthError


def prepare(settings: Settings) -> None:
    """Raises `BerthError` or OSError."""
    keyring.init(settings)
    asyncio.run(migrate(settings.database_url))
    keyring.ensure_admin_key(settings.master_key_file.with_name("admin.key"), settings.database_url)


def main() -> int:
    try:
        prepare(Settings())
    except (BerthError, OSError) as error:
        sys.stderr.write(f"prepare: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
