"""Makes what the servers need before they start: `python -m infra.compose.prepare`.

These are the key files, the key that signs webhooks, the logins at Temporal and the tables
of the database. As long as no administrator has an API key, there is also one that ends
after a day, next to the private keys. Safe to repeat: existing keys are kept, and a
migrated database is left alone.
"""

import asyncio
import sys
from pathlib import Path

from infra.compose import temporal_tokens
from infra.database.migrate import migrate_as_owner
from infra.setting_names import print_unread_variables
from infra.settings import Settings, read_settings
from infra.vault import key_file, keyring
from worker_runtime.protocol.errors import BerthError

#: The key set that Temporal's authorizer reads, and the login of the namespace's registration.
TEMPORAL_KEYS = Path("/keys/temporal")


#: The folder in which 0.1.0 keeps the secrets of all tiers of jobs, and where each belongs, below
#: the folder of all keys.
FORMER_JOBS = "jobs"
PROVIDER_FILES = {
    "webhook.key": "webhook",
    "mail.password": "email",
    "messaging.token": "messaging",
    "push.json": "push",
}


def split_provider_secrets(keys: Path) -> list[Path]:
    """Moves what 0.1.0 kept for all tiers to the folder
    of the tier that needs it; returns what was moved.

    A file that a tier has already stays,
    and so does what we do not know. Safe to kill and to repeat.
    """
    moved = []
    for name, tier in PROVIDER_FILES.items():
        old, new = keys / FORMER_JOBS / name, keys / tier / name
        if not old.is_file():
            continue
        if not new.exists():
            key_file.write_key_file(new, key_file.read_key_file(old, private=True), private=True)
            moved.append(new)
        old.unlink()
    return moved


def prepare(settings: Settings, temporal_keys: Path = TEMPORAL_KEYS) -> None:
    """Raises `BerthError` or OSError."""
    split_provider_secrets(temporal_keys.parent)
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
    print_unread_variables()
    try:
        prepare(read_settings(Settings))
    except (BerthError, OSError) as error:
        sys.stderr.write(f"prepare: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
