"""All checks of `berth doctor`: servers and keys, and what only some processes use."""

import asyncio
import sys
from collections.abc import Sequence

from infra.database.engine import Database
from infra.database.trading import webhooks
from infra.doctor.servers import (
    API_KEYS,
    BROKER,
    POSTGRESQL,
    TEMPORAL,
    VALKEY,
    Check,
    CheckResult,
    SettingRefused,
    run_check,
)
from infra.jobs.fleet import runner_config
from infra.launchers.registry import create_launcher
from infra.settings import Settings
from infra.vault import key_pairs
from infra.vault.master_key import check_unwrapper
from infra.vault.secret_versions import load_versions
from worker_runtime.protocol.errors import BerthError


async def _orchestrator_keys(settings: Settings) -> None:
    key_pairs.OrchestratorKeys(settings.orchestrator_key_dir)
    load_versions(settings.message_key_file)
    await check_unwrapper(settings)
    if settings.master_kms_key:
        return
    ring = key_pairs.load_ring(settings.master_key_file, *settings.master_key_retired)
    public = settings.master_public_file
    if public.exists() and not ring.holds(key_pairs.load_public(public).key_id):
        raise SettingRefused(f"{public} is not the public half of {settings.master_key_file}")


async def _launcher(settings: Settings) -> None:
    launcher = create_launcher(settings)
    try:
        await launcher.list()
    finally:
        await launcher.close()


async def _delivery(settings: Settings) -> None:
    """The runner itself tries its mail server, as it will use it."""

    def sends(queue: str) -> bool:  # a fleet of another tier needs no way to
        return not {"*", queue}.isdisjoint(settings.jobs_queues)

    if settings.alert_mails and not settings.mail_host and sends("email"):
        raise SettingRefused("BERTH_ALERT_MAILS wants mails, and BERTH_MAIL_HOST names no server")
    if settings.alert_webhooks and not settings.webhook_key_file and sends("webhook"):
        raise SettingRefused("BERTH_ALERT_WEBHOOKS wants webhooks, and BERTH_WEBHOOK_KEY_FILE names no key")
    config, pipe = runner_config(settings), asyncio.subprocess.PIPE
    command = (sys.executable, "-P", "-m", "worker_runtime.jobs", "--check")
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        said, _ = await process.communicate(config)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        reason = said.decode(errors="replace").strip()
        raise ConnectionError(reason) if reason.startswith("MAIL_DEFERRED") else SettingRefused(reason)


class UnitUnconfirmed(BerthError, code="UNIT_UNCONFIRMED", retryable=True):
    """Nobody has confirmed what the quantities of a webhook count."""


async def _webhooks(settings: Settings) -> None:
    async with Database(settings.database_url, pool_size=1) as database:
        count = await database.fetch(webhooks.count_unconfirmed)
    if count:
        raise UnitUnconfirmed(
            f"{count} webhooks for stocks count lots, and nobody has confirmed that; TradingView sends"
            " shares: `berth webhooks list USER`, then"
            " `berth webhooks change USER ID --quantity-unit shares` or lots"
        )


ORCHESTRATOR_KEYS = Check(
    "orchestrator-keys", "BERTH_MASTER_K…, BERTH_ORCHESTRATOR_KEY_DIR", _orchestrator_keys
)
LAUNCHER = Check("launcher", "BERTH_LAUNCHER, and its own", _launcher)
DELIVERY: Check = Check("delivery", "BERTH_MAIL_…, BERTH_WEBHOOK_KEY_FILE", _delivery)
WEBHOOKS = Check("webhooks", "their quantity_unit", _webhooks, is_notice=True)
CHECKS = (POSTGRESQL, VALKEY, TEMPORAL, API_KEYS, ORCHESTRATOR_KEYS, LAUNCHER, BROKER, DELIVERY, WEBHOOKS)


def examine(settings: Settings, names: Sequence[str] = ()) -> list[CheckResult]:
    """All checks, or those of these names, at the same time."""

    async def run() -> list[CheckResult]:
        wanted = [run_check(one, settings) for one in CHECKS if one.name in (names or (one.name,))]
        return await asyncio.gather(*wanted)

    return asyncio.run(run())
