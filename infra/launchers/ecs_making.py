"""The ECS launcher that the settings ask for."""

from __future__ import annotations

from infra.launchers.ecs import EcsLauncher
from infra.launchers.ecs_api import EcsApi
from infra.launchers.ecs_request import Place
from infra.settings import EcsSettings
from infra.vault import key_file
from worker_runtime.protocol import launch_document
from worker_runtime.protocol.errors import BerthError


class EcsUnconfigured(BerthError):
    """The ECS launcher needs BERTH_ECS_QUEUE_URL."""

    code = "ECS_UNCONFIGURED"


def create_ecs_launcher(settings: EcsSettings) -> EcsLauncher:
    """Raises `EcsUnconfigured`, and what a missing or exposed key file raises. Asks nothing of AWS yet."""
    if not settings.queue_url:
        raise EcsUnconfigured
    place = Place(
        cluster=settings.cluster,
        task_definition=settings.task_definition,
        container=settings.container,
        capacity_providers=settings.capacity_providers,
        placement=settings.placement,
        subnets=settings.subnets,
        security_groups=settings.security_groups,
    )
    key = launch_document.key_from(key_file.read(settings.launch_key_file, private=True))
    api = EcsApi(
        cluster=settings.cluster, family=place.family, queue_url=settings.queue_url, region=settings.region
    )
    return EcsLauncher(place, api, key, listing_period=settings.listing_period)
