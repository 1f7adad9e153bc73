"""Creates the launcher that the settings name, and the scaler of its hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from infra.hosts.scaling import HostScaler
from infra.launchers.port import Launcher
from infra.settings import EcsSettings, Settings
from worker_runtime.protocol.errors import BerthError

if TYPE_CHECKING:
    from infra.launchers.docker.launcher import DockerLauncher


class UnknownLauncher(BerthError):
    """The settings name a launcher that this release does not have."""

    code = "UNKNOWN_LAUNCHER"


def _create_process_launcher(settings: Settings) -> Launcher:
    from infra.launchers.process import ProcessLauncher

    return ProcessLauncher(settings.node_socket)


def _create_ecs_launcher(_: Settings) -> Launcher:
    from infra.launchers.ecs.launcher import create_ecs_launcher

    return create_ecs_launcher(EcsSettings())


def create_docker_launcher(settings: Settings) -> DockerLauncher:
    from infra.launchers.docker.launcher import DockerLauncher

    return DockerLauncher(
        settings.docker_socket,
        image=settings.docker_image,
        network=settings.docker_network,
        fleet=settings.docker_fleet,
    )


#: Each maker imports its launcher itself, so the libraries of the others are not loaded.
_MAKERS: dict[str, Callable[[Settings], Launcher]] = {
    "docker": create_docker_launcher,
    "ecs": _create_ecs_launcher,
    "process": _create_process_launcher,
}


def create_launcher(settings: Settings) -> Launcher:
    """The launcher named by `BERTH_LAUNCHER`; the caller closes it. Raises `UnknownLauncher`."""
    maker = _MAKERS.get(settings.launcher)
    if maker is None:
        raise UnknownLauncher(
            f"BERTH_LAUNCHER is {settings.launcher!r}; available: {', '.join(sorted(_MAKERS))}"
        )
    return maker(settings)


def create_host_scaler(settings: Settings, ecs: EcsSettings) -> HostScaler | None:
    """Returns None where the hosts are not ours to scale. The caller closes it."""
    if settings.launcher != "ecs" or not ecs.host_provider:
        return None
    from infra.hosts.ecs import EcsHosts

    return EcsHosts(cluster=ecs.cluster, capacity_provider=ecs.host_provider, region=ecs.region or None)
