"""Which launcher the settings ask for."""

from __future__ import annotations

from collections.abc import Callable

from infra.launchers.port import Launcher
from infra.settings import EcsSettings, Settings
from worker_runtime.protocol.errors import BerthError


class UnknownLauncher(BerthError):
    """The settings name a launcher that this release does not have."""

    code = "UNKNOWN_LAUNCHER"


def _process(settings: Settings) -> Launcher:
    from infra.launchers.process import ProcessLauncher

    return ProcessLauncher(settings.node_socket)


def _ecs(_: Settings) -> Launcher:
    from infra.launchers.ecs_making import create_ecs_launcher

    return create_ecs_launcher(EcsSettings())


def _docker(settings: Settings) -> Launcher:
    from infra.launchers.docker import DockerLauncher

    return DockerLauncher(
        settings.docker_socket,
        image=settings.docker_image,
        network=settings.docker_network,
        fleet=settings.docker_fleet,
    )


#: Each maker imports its launcher itself: nobody loads the libraries of one that is not used.
_MAKERS: dict[str, Callable[[Settings], Launcher]] = {
    "docker": _docker,
    "ecs": _ecs,
    "process": _process,
}


def create_launcher(settings: Settings) -> Launcher:
    """The launcher named by `BERTH_LAUNCHER`; the caller closes it. Raises `UnknownLauncher`."""
    maker = _MAKERS.get(settings.launcher)
    if maker is None:
        raise UnknownLauncher(
            f"BERTH_LAUNCHER is {settings.launcher!r}; available: {', '.join(sorted(_MAKERS))}"
        )
    return maker(settings)
