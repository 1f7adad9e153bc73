"""Rotation of the local master key: replaces the key pair, then rewraps every data key.

The files keep their names. The old private half stays as `master-<key id>.key`: an API process may
have stored something under its public half in that moment. While such a file exists, a new run
continues the same rotation.
"""

from dataclasses import dataclass
from pathlib import Path

from infra.database.engine import Database
from infra.settings import Settings
from infra.vault import key_file, key_pairs, vault
from infra.vault.key_pairs import MasterKeyRing
from infra.vault.master_key import master_unwrapper, master_wrapper


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The result of one run. `under_old_keys` counts credentials that an old key still wraps."""

    key_id: str
    started: bool
    rewrapped: int
    under_old_keys: int
    kept: tuple[Path, ...]


def kept_files(private: Path) -> tuple[Path, ...]:
    return tuple(sorted(private.parent.glob(f"{private.stem}-*{private.suffix}")))


def replace_pair(private: Path, public: Path) -> bool:
    """Replaces the pair, or completes what a killed run began; True if it created a new key.

    The next run can continue after a kill at any step: the new private half is written as
    `<name>.next`, the old one is kept, the new one takes its place, then the public half is
    written. Raises `KeyFileMissing`, `KeyFileExposed` or `KeyFileCorrupt`.
    """
    waiting = private.with_name(f"{private.name}.next")
    present = key_pairs.load_ring(private).public
    started = not waiting.exists() and not kept_files(private)
    if started:
        key_pairs.load_public(public)  # raises if a half is missing, before anything changes
        key_pairs.create_private_key(waiting)
    if waiting.exists():
        old = private.with_name(
            f"{private.stem}-{present.key_id.removeprefix('local:')}{private.suffix}"
        )
        key_file.write_key_file(old, key_file.read_key_file(private, private=True), private=True)
        waiting.replace(private)
        present = key_pairs.load_ring(private).public
    if not public.exists() or key_pairs.load_public(public) != present:
        key_pairs.write_public(present, public)
    return started


async def rotate_master_key(
    private: Path, public: Path, database: Database, *, retired: tuple[Path, ...] = ()
) -> Rotation:
    """Runs the rotation once; safe to kill and repeat next to a running API and orchestrator.

    Raises what `replace_pair` does, `UnknownMasterKey` for credentials under an unknown key, or
    `DatabaseUnavailable`; the next run continues.
    """
    with key_file.locked(private.parent):
        # Checks first that the database answers.
        await vault.count_under_other_keys(database, "")
        started = replace_pair(private, public)
        kept = kept_files(private)
        ring: MasterKeyRing = key_pairs.load_ring(private, *kept, *retired)
        rewrapped = await vault.rewrap_all_data_keys(database, ring, ring.public)
        remaining = await vault.count_under_other_keys(database, ring.public.key_id)
    return Rotation(
        key_id=ring.public.key_id,
        started=started,
        rewrapped=rewrapped,
        under_old_keys=remaining,
        kept=kept,
    )


async def move_to_kms(settings: Settings, database: Database) -> Rotation:
    """Wraps by the key in KMS what key files wrap.
    KMS rotates its key by itself, under the same ARN."""
    wrapper = master_wrapper(settings)
    rewrapped = await vault.rewrap_all_data_keys(database, master_unwrapper(settings), wrapper)
    remaining = await vault.count_under_other_keys(database, wrapper.key_id)
    return Rotation(
        key_id=wrapper.key_id, started=False, rewrapped=rewrapped, under_old_keys=remaining, kept=()
    )
