"""Is this process alive, and can it do its work?"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from api.schemas.fields import View


class Alive(View):
    status: Literal["ok"] = "ok"


class Dependency(View):
    state: Literal["up", "down"]
    ms: Annotated[float, Field(description="Milliseconds that the answer took.")]
    reason: str = ""


class Readiness(View):
    model_config = ConfigDict(
        frozen=True,
        json_schema_extra={
            "examples": [
                {
                    "ready": True,
                    "dependencies": {
                        "postgresql": {"state": "up", "ms": 0.7, "reason": ""},
                        "valkey": {"state": "up", "ms": 0.2, "reason": ""},
                        "temporal": {"state": "up", "ms": 1.1, "reason": ""},
                    },
                }
            ]
        },
    )

    ready: bool
    dependencies: dict[str, Dependency]
