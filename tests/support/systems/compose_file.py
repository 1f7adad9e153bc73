"""`compose.yaml`, read without Docker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
#: The fleets of job runners, by the queues that they serve.
FLEETS = {f"jobs-{tier}": tier for tier in ("email", "webhook", "sms", "whatsapp", "push")} | {
    "jobs": "default"
}


def load_compose() -> dict[str, Any]:
    """Returns `compose.yaml`, with each variable in an image's name replaced by its default."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    for service in loaded["services"].values():
        service["image"] = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", service["image"])
    return loaded
