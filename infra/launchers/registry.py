"""Creates the launcher that the settings name, and the scaler of its hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.hosts.scaling import HostScaler
from infra.launchers.port import Launcher
from infra.settings import EcsSettings, Settings, read_settings

if TYPE_CHECKING:
    from infra.launchers.docker.launcher import DockerLauncher


def create_docker_launcher(settings: Settings) -> DockerLauncher:
    from infra.launchers.docker.launcher import DockerLauncher

    return DockerLauncher(
        settings.docker_socket,
        image=settings.docker_image,
        network=settings.docker_network,
        fleet=settings.docker_fleet,
    )


def create_launcher(settings: Settings) -> Launcher:
    """Creates the launcher named by `BERTH_LAUNCHER`; the caller closes it. Only its own library is
    loaded."""
    match settings.launcher:
        case "docker":
            return create_docker_launcher(settings)
        case "ecs":
            from infra.launchers.ecs.launcher import create_ecs_launcher

            return create_ecs_launcher(read_settings(EcsSettings))
        case "process":
            from infra.launchers.process import ProcessLauncher

            return ProcessLauncher(settings.node_socket)


def create_host_scaler(settings: Settings, ecs: EcsSettings) -> HostScaler | None:
    """Returns None where the hosts are not ours to scale. The caller closes it."""
    if settings.launcher != "ecs" or not ecs.host_provider:
        return None
    from infra.hosts.ecs import EcsHosts

    return EcsHosts(
        cluster=ecs.cluster, capacity_provider=ecs.host_provider, region=ecs.region or None
    )
