"""The tutorial's commands do what its pages say, pasted one after the other as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.systems.local import RunningSystem

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial"
PAGES = ("first-user", "second-account", "first-signal")


def _commands(system: RunningSystem) -> str:
    """All shell blocks but the start of the system, with the addresses and folder of the tests."""
    texts = [(TUTORIAL / f"{page}.md").read_text(encoding="utf-8") for page in PAGES]
    blocks = [block for text in texts for block in re.findall(r"```sh\n(.*?)```", text, re.S)]
    script = "".join(block for block in blocks if block.strip() != "make run")
    for shown, real in (
        ("http://127.0.0.1:8000", system.stack.api_url),
        (".berth/", f"{system.stack.folder.path}/"),
        ("$PWD/.venv/bin", str(Path(sys.executable).parent)),
    ):
        assert shown in script
        script = script.replace(shown, real)
    return f"set -eu -o pipefail\n{script}"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_commands_of_the_tutorial_can_be_pasted_as_they_are(
    system: RunningSystem, client_distribution: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        ["/bin/bash", "-c", _commands(system)],
        cwd=tmp_path,
        env={
            **os.environ,
            "BERTH_DATA_DIR": str(system.stack.folder.path),
            "BERTH_EXCHANGE_ADMIN_URL": system.stack.exchange.admin_url,
            "PYTHONPATH": str(client_distribution),  # `make setup` has it in .venv
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout
    refused = re.findall(r'"code": ?"([A-Z_]+)"', shown)
    assert refused == ["QUANTITY_LIMIT", "TRADING_HALTED"], shown
    # The first order and its own page, the second account's, the alert and its repeat, and both of
    # an entry.
    assert shown.count('"state":"filled"') == 7, shown
    assert shown.count('"login":"verified"') == 2, shown
    assert "alice alice-1: version 1 is stored; login verified" in shown
    assert "submitted then cancelled" in shown
    assert '"connected": "2/2"' in shown
    assert "alice: reloaded" in shown
    assert '"direction":"short"' in shown
    assert re.search(r"Failed +Claimed", shown), "the killed worker was replaced"
    assert list(tmp_path.iterdir()) == []
