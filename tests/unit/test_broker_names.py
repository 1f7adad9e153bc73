"""No code names a broker, a market of one, or its currency: records do."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

from worker_runtime.protocol.installed_brokers import built_in_brokers

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("activities", "api", "infra", "worker_runtime", "workflows")
#: Adapters and records, and the paper exchange with the programs that start it.
EXEMPT = (
    "worker_runtime/brokers/",
    "infra/exchange/",
    "infra/lab/",
    "infra/local/",
    "infra/images/",
)
_MARKET = re.compile(r"\b(TWD|taipei|twse|tpex|taifex|taiwan)", re.IGNORECASE)


def sources() -> dict[str, str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *LAYERS],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    kept = [name for name in listed if name.endswith((".py", ".lua", ".sql", ".html", ".js"))]
    return {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in kept
        if not name.startswith(EXEMPT) and (ROOT / name).is_file()
    }


def names_a_broker(text: str) -> bool:
    """Returns True if a string of the source is the name of a broker."""
    return any(
        isinstance(node, ast.Constant) and node.value in built_in_brokers()
        for node in ast.walk(ast.parse(text))
    )


def test_no_code_names_a_market() -> None:
    assert {name for name, text in sources().items() if _MARKET.search(text)} == set()


def test_no_code_names_a_broker() -> None:
    named = {
        name for name, text in sources().items() if name.endswith(".py") and names_a_broker(text)
    }
    assert named == set()
