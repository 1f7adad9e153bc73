"""How a route gets the process's services."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from api.services.container import Services


async def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


InServices = Annotated[Services, Depends(services)]
