"""Health: no key needed, nothing secret told."""

from __future__ import annotations

from fastapi import APIRouter, Response

from api.routes.services import InServices
from api.schemas.health import Alive, Readiness

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="Is this process alive?")
async def healthz() -> Alive:
    """Asks nobody else: a failing database is no reason to restart the API."""
    return Alive()


@router.get(
    "/readyz",
    summary="Can it do its work?",
    responses={503: {"model": Readiness, "description": "At least one server cannot be reached."}},
)
async def readyz(services: InServices, response: Response) -> Readiness:
    """The state of PostgreSQL, Valkey and Temporal; 503 when one of them is down.

    Not ready is not useless: orders of users with a live worker need no Temporal.
    """
    found = await services.readiness.check()
    if not found.ready:
        response.status_code = 503
    return found
