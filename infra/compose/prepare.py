"""Makes what the servers need before they start: `python -m infra.compose.prepare`.

These are the key files, the key that signs webhooks, the logins at Temporal and the tables of the database.
As long as no administrator has an API key, there is also one that ends after a day, beside the private keys.
Safe to repeat: existing keys are kept, and a migrated database is left alone.
"""

import asyncio
import sys
from pathlib import Path

from infra.compose import temporal_tokens
from infra.database.migrate import migrate_as_owner
from infra.settings import Settings, read_settings
from infra.vault import keyring
from worker_runtime.protocol.errors import BerthError

#: The key set that Temporal's authorizer reads, and the login of the namespace's registration.
TEMPORAL_KEYS = Path("/keys/temporal")


def prepare(settings: Settings, temporal_keys: Path = TEMPORAL_KEYS) -> None:
    """Raises `BerthError` or OSError."""
    keyring.create_missing_keys(settings)
    if settings.temporal_api_key_file:
        temporal_tokens.ensure_tokens(
            temporal_keys / "public" / "jwks.json",
            {
                Path(settings.temporal_api_key_file): temporal_tokens.worker_permissions(
                    settings.temporal_namespace
                ),
                temporal_keys / "admin.jwt": temporal_tokens.SYSTEM_ADMIN,
            },
        )
    asyncio.run(migrate_as_owner(settings))
    keyring.ensure_bootstrap_key(settings.master_key_file.with_name("admin.key"), settings)


def main() -> int:
    try:
        prepare(read_settings(Settings))
    except (BerthError, OSError) as error:
        sys.stderr.write(f"prepare: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
