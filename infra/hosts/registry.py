"""Which platform runs the hosts: the one that launches the workers."""

from __future__ import annotations

from infra.hosts.port import HostScaler
from infra.settings import EcsSettings, Settings


def create_host_scaler(settings: Settings, ecs: EcsSettings) -> HostScaler | None:
    """None where hosts are not ours to scale. The caller closes it."""
    if settings.launcher != "ecs" or not ecs.host_provider:
        return None
    from infra.hosts.ecs import EcsHosts

    return EcsHosts(cluster=ecs.cluster, capacity_provider=ecs.host_provider, region=ecs.region or None)
