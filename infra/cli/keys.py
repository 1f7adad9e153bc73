"""`berth keys rotate`: rotates the master key once, and says what to do next."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import typer

from infra.database.engine import Database
from infra.local.stack import local_settings
from infra.settings import Settings
from infra.vault import rotation
from infra.vault.rotation import Rotation
from worker_runtime.protocol.errors import BerthError


def run_rotation(data: Path | None) -> int:
    """`data` is the folder of a running `berth up`; without it the settings say where things are."""
    try:
        settings = Settings() if data is None else local_settings(data)
        done = asyncio.run(_rotate(settings))
    except (BerthError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    typer.echo("\n".join(_next_steps(done, local=data is not None)))
    return 0


async def _rotate(settings: Settings) -> Rotation:
    database = Database(settings.database_url, pool_size=1)
    try:
        return await rotation.rotate_master_key(
            settings.master_key_file,
            settings.master_public_file,
            database,
            retired=settings.master_key_retired,
        )
    finally:
        await database.close()


def _next_steps(done: Rotation, *, local: bool) -> list[str]:
    files = [str(path.absolute()) for path in done.kept]
    lines = [
        f"{'made a new master key' if done.started else 'the master key is'} {done.key_id}",
        f"rewrapped {done.rewrapped} stored credentials; {done.left} are still under an old key",
    ]
    if not files:
        return lines
    lines += ["", f"The old key is kept in {', '.join(files)}. Next:"]
    if local:
        lines.append("1. Restart `berth up`: it finds the old key by itself.")
    else:
        lines += [
            "1. Until the old key goes, start every orchestrator with",
            f"     BERTH_MASTER_KEY_RETIRED='{json.dumps(files)}'",
            "   Restart the orchestrators with it first, then the API: it still uses the old key.",
        ]
    lines += [
        "2. Run `berth keys rotate` again: it makes no other key, and rewraps what was stored meanwhile.",
        "3. When every API process was restarted and 0 credentials are under an old key, remove the old",
        "   file" + (" and restart." if local else ", and BERTH_MASTER_KEY_RETIRED at the next restart."),
        "   Keep a copy with the database backups made before: they need it.",
    ]
    return lines
