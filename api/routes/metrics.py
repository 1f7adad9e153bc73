"""Metrics for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Response

from api import problems
from api.auth import Caller, require_staff
from api.errors import Forbidden, ValkeyUnavailable
from api.routes.services import InServices
from infra import fleet_metrics, job_metrics, prometheus
from infra.database.engine import DatabaseUnavailable

router = APIRouter(tags=["fleet"])


@router.get(
    "/metrics",
    summary="Metrics of the fleet and its jobs",
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus' text format.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
        **problems.responses(Forbidden, DatabaseUnavailable, ValkeyUnavailable),
    },
)
async def get_metrics(caller: Caller, services: InServices) -> Response:
    """Free workers and workers in use, claims, unsettled orders, the last maintenance; jobs: what waits,
    waits and run times, ends, late renewals. For operators' keys.
    """
    require_staff(caller)
    page = prometheus.Page()
    async with services.database.session(autocommit=True) as session:
        await fleet_metrics.write(page, services.valkey, session, services.settings.pool)
    await job_metrics.write(page, services.valkey)
    return Response(page.text(), media_type=prometheus.MEDIA_TYPE)
