"""Makes what the servers need before they start: `python -m infra.compose.prepare`.

These are the key files, the key that signs webhooks, the tables of the database, and an administrator's API
key beside the private keys. Safe to repeat: existing keys are kept, and a migrated database is left alone.
"""

from __future__ import annotations

import asyncio
import secrets
import sys

from infra.database.migrate import migrate
from infra.settings import Settings
from infra.vault import key_file, keyring
from worker_runtime.protocol.errors import BerthError

#: Random bytes.
_WEBHOOK_KEY = 48


def prepare(settings: Settings) -> None:
    """Raises `BerthError` or OSError."""
    keyring.create_missing_keys(settings)
    for path in settings.webhook_key_files[:1]:  # the current one; the operator keeps earlier ones
        if not path.exists():
            key_file.write_key_file(path, f"{secrets.token_urlsafe(_WEBHOOK_KEY)}\n".encode(), private=True)
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
