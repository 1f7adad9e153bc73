"""Having a user's worker made Active, for work that is not a caller's."""

from __future__ import annotations

import asyncio

import structlog
from temporalio.client import Client

from infra.settings import Settings
from workflows.starting import WorkerStarter


class Ensuring:
    """Calls `ensure_active`, once per user at a time: whoever comes meanwhile shares it."""

    def __init__(self, temporal: Client, settings: Settings) -> None:
        self._starter = WorkerStarter(temporal, settings, structlog.get_logger())

    async def ensure(self, user_id: str) -> None:
        """Returns when the user's worker is Active; raises as `WorkerStarter.ensure`."""
        # Shielded: another caller waits for the same.
        await asyncio.shield(self._starter.ensure(user_id, mark_missing=True))
