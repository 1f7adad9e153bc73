"""RunTask's parameters for one worker.

ECS refuses a repeat of a token whose parameters differ (`ConflictException`). So nothing here is
random, and nothing depends on the time.
"""

import re
from hashlib import blake2b
from typing import Any

from infra.launchers.ecs.failures import LaunchMisconfigured
from infra.launchers.ecs.records import (
    GROUP,
    TAG_POOL,
    TAG_TOKEN,
    TAG_VERSION,
    TAG_WORKER,
    family_of,
)
from infra.settings import EcsSettings
from infra.worker_task import LaunchSpec
from worker_runtime.protocol import launch_document
from worker_runtime.protocol.messages import encode

#: RunTask takes 64 characters from ! to ~ for `clientToken`; a tag's value may have these only.
_TOKEN = re.compile(r"[A-Za-z0-9+\-=._:/@]{1,64}")
_MIB = 1024 * 1024

_ZONES = {"type": "spread", "field": "attribute:ecs.availability-zone"}
#: Binpack goes by memory: at 1,024 MiB a worker, it fills a host first.
_STRATEGIES = {
    "spread": [_ZONES, {"type": "spread", "field": "instanceId"}],
    "binpack": [_ZONES, {"type": "binpack", "field": "memory"}],
}


def client_token(token: str) -> str:
    """Returns the token itself where ECS accepts it, else its hash."""
    if _TOKEN.fullmatch(token):
        return token
    return blake2b(token.encode(), digest_size=32).hexdigest()


def run_task(
    settings: EcsSettings, spec: LaunchSpec, token: str, launch_key: bytes
) -> dict[str, Any]:
    """Returns the request for one worker. Its overrides of the task definition have at most 8,192
    characters.

    The launch document is encrypted: everybody who may describe tasks can read overrides, and
    they stand in CloudTrail and in `docker inspect` (ADR 0012). The spec's image is a revision
    of the task definition. Raises `LaunchMisconfigured` for another family, whose tasks our
    listings would not show.
    """
    config = spec.config
    family = family_of(settings.task_definition)
    if spec.image and family_of(spec.image) != family:
        raise LaunchMisconfigured(f"{spec.image} is no revision of {family}")
    document = launch_document.seal(encode(config), launch_key, worker_id=config.worker_id)
    request: dict[str, Any] = {
        "cluster": settings.cluster,
        "taskDefinition": spec.image or settings.task_definition,
        "count": 1,
        "clientToken": client_token(token),
        "group": f"{GROUP}{config.pool}",
        "startedBy": config.worker_id,
        "overrides": {
            "containerOverrides": [
                {
                    "name": settings.container,
                    "environment": [
                        {"name": launch_document.WORKER, "value": config.worker_id},
                        {"name": launch_document.DOCUMENT, "value": document},
                    ],
                    "cpu": spec.cpu_units,
                    "memory": spec.memory_hard // _MIB,
                    "memoryReservation": spec.memory_soft // _MIB,
                }
            ]
        },
        "enableECSManagedTags": True,
        "tags": [
            {"key": TAG_WORKER, "value": config.worker_id},
            {"key": TAG_POOL, "value": config.pool},
            {"key": TAG_VERSION, "value": config.version},
            {"key": TAG_TOKEN, "value": client_token(token)},
        ],
    }
    if settings.capacity_providers:
        request["capacityProviderStrategy"] = [
            {"capacityProvider": name, "weight": weight}
            for name, weight in sorted(settings.capacity_providers.items())
        ]
    if settings.placement != "none":
        request["placementStrategy"] = _STRATEGIES[settings.placement]
    if settings.subnets:
        request["networkConfiguration"] = {
            "awsvpcConfiguration": {
                "subnets": list(settings.subnets),
                "securityGroups": list(settings.security_groups),
                "assignPublicIp": "DISABLED",
            }
        }
    return request
