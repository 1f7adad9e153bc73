"""Rotation of the local master key: a new pair in place of the present one, then every data key rewrapped.

The present files keep their names. The old private half stays beside the new one as `master-<key id>.key`
for as long as somebody may still encrypt to it: API processes hold the old public half until they are
restarted. While such a file is there, a rotation is under way and running it again only goes on with it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.database.engine import Database
from infra.vault import key_file, key_pairs, vault
from infra.vault.key_pairs import MasterKeyRing


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """What one run did. `left` counts credentials that are still under an old key."""

    key_id: str
    started: bool
    rewrapped: int
    left: int
    kept: tuple[Path, ...]


def kept_files(private: Path) -> tuple[Path, ...]:
    """The old private halves beside `private`, by name."""
    return tuple(sorted(private.parent.glob(f"{private.stem}-*{private.suffix}")))


def replace_pair(private: Path, public: Path) -> bool:
    """Puts a new pair in place, or completes what a killed run began; True if a new key came into being.

    Each step can be the last one before a kill, and the next run goes on from there: the new private half
    waits as `<name>.next`, the old one is kept, the new one takes its place, the public half follows.
    Raises `KeyFileMissing`, `KeyFileExposed` or `KeyFileCorrupt`.
    """
    waiting = private.with_name(f"{private.name}.next")
    present = key_pairs.load_ring(private).public
    started = not waiting.exists() and not kept_files(private)
    if started:
        key_pairs.load_public(public)  # a missing half is told before anything changes
        key_pairs.create_private_key(waiting)
    if waiting.exists():
        old = private.with_name(f"{private.stem}-{present.key_id.removeprefix('local:')}{private.suffix}")
        key_file.write_key_file(old, key_file.read_key_file(private, private=True), private=True)
        waiting.replace(private)
        present = key_pairs.load_ring(private).public
    if not public.exists() or key_pairs.load_public(public) != present:
        key_pairs.write_public(present, public)
    return started


async def rotate_master_key(
    private: Path, public: Path, database: Database, *, retired: tuple[Path, ...] = ()
) -> Rotation:
    """One run: safe to kill and to repeat, and beside a running API and orchestrator.

    Raises what `replace_pair` does, `UnknownMasterKey` for credentials under a key that is not at hand, or
    `DatabaseUnavailable` (the new pair is in place then; the next run goes on).
    """
    with _alone(private.parent):
        # First: no new pair while the database is away.
        await vault.count_under_other_keys(database, "")
        started = replace_pair(private, public)
        kept = kept_files(private)
        ring: MasterKeyRing = key_pairs.load_ring(private, *kept, *retired)
        rewrapped = await vault.rewrap_all_data_keys(database, ring, ring.public)
        left = await vault.count_under_other_keys(database, ring.public.key_id)
    return Rotation(key_id=ring.public.key_id, started=started, rewrapped=rewrapped, left=left, kept=kept)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits for another rotation of the same files; the kernel ends the lock with its holder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
