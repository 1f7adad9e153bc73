"""The fakes with faults do what their names say."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import ValidationError

from infra.launchers.process import ProcessLauncher
from infra.launchers.registry import create_launcher
from infra.settings import Settings
from infra.worker_task import LauncherUnreachable, LaunchFailed, LaunchSpec, Task
from tests.support.launchers.fake import FakeLauncher
from tests.support.launchers.faulty import (
    FailingLauncher,
    LostReplyLauncher,
    NeverReadyLauncher,
    SlowLauncher,
)
from tests.support.launchers.worker_specs import spec


async def test_a_failing_launcher_recovers_after_its_failures() -> None:
    launcher = FailingLauncher(2)
    for _ in range(2):
        with pytest.raises(LaunchFailed):
            await launcher.launch(spec("w-1"), "token-1")
    assert (await launcher.launch(spec("w-1"), "token-1")).worker_id == "w-1"


async def test_a_lost_reply_hides_a_launch_that_the_same_token_finds_again() -> None:
    launcher = LostReplyLauncher()
    with pytest.raises(LauncherUnreachable):
        await launcher.launch(spec("w-1"), "token-1")
    task = await launcher.launch(spec("w-1"), "token-1")
    assert await launcher.list() == [task]
    assert len(launcher.launched) == 1


@pytest.mark.parametrize(("kind", "ready"), [(FakeLauncher, ["w-1"]), (NeverReadyLauncher, [])])
async def test_only_a_never_ready_launcher_keeps_workers_from_becoming_ready(
    kind: type[FakeLauncher], ready: list[str]
) -> None:
    reported: list[str] = []

    async def on_launch(_: LaunchSpec, task: Task) -> None:
        reported.append(task.worker_id)

    launcher = kind(on_launch)
    await launcher.launch(spec("w-1"), "token-1")
    assert reported == ready
    assert len(await launcher.list()) == 1


async def test_a_slow_launcher_has_nothing_until_its_delay_is_over() -> None:
    launcher = SlowLauncher(0.05)
    launching = asyncio.ensure_future(launcher.launch(spec("w-1"), "token-1"))
    await asyncio.sleep(0)
    assert await launcher.list() == []
    task = await launching
    assert await launcher.list() == [task]


async def test_an_unreachable_fake_answers_nothing() -> None:
    launcher = FakeLauncher()
    launcher.unreachable = True
    for call in (launcher.list(), launcher.stop("fake-1", "test"), launcher.launch(spec("w"), "t")):
        with pytest.raises(LauncherUnreachable):
            await call


async def test_the_registry_makes_the_launcher_that_the_settings_name() -> None:
    assert isinstance(create_launcher(Settings(launcher="process")), ProcessLauncher)
    with pytest.raises(ValidationError, match="'process', 'docker' or 'ecs'"):
        Settings.model_validate({"launcher": "kubernetes"})
