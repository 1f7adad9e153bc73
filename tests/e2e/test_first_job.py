"""The tutorial of own jobs does what its page says, block by block, with a package outside of the
tree."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.interpreters import opened_interpreter
from tests.support.systems.local import RunningSystem, until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial" / "first-job.md"
#: What the block begins with that belongs into a terminal of its own.
RUNNER = "cd ~/shop && berth jobs run"
HANDLED = "charge-order-1.failed."


def _blocks(system: RunningSystem) -> list[str]:
    """The page's shell blocks, with the addresses and folders of the tests."""
    blocks: list[str] = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    script = "\0".join(blocks)
    for shown, real in (
        ("http://127.0.0.1:8000", system.stack.api_url),
        ("$PWD/.berth", str(system.stack.folder.path)),
        ("$PWD/.venv/bin", str(Path(sys.executable).parent)),
    ):
        assert shown in script
        script = script.replace(shown, real)
    return script.split("\0")


def _run(home: Path, blocks: list[str]) -> str:
    done = subprocess.run(
        ["/bin/bash", "-c", "set -eu -o pipefail\n" + "".join(blocks)],
        cwd=home,
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_tutorial_of_own_jobs_can_be_pasted_as_it_is(
    system: RunningSystem, short_directory: Path
) -> None:
    home = short_directory
    home.chmod(0o755)  # as root, the runner gives its jobs another user
    blocks = _blocks(system)
    names, at = (
        blocks[0],
        next(number for number, block in enumerate(blocks) if block.startswith(RUNNER)),
    )
    _run(home, blocks[:at])
    log = home / "runner.log"
    command = [
        *opened_interpreter(home),
        "/bin/bash",
        "-c",
        names + blocks[at].replace("&& berth", "&& exec berth"),
    ]
    with log.open("w") as output:
        runner = subprocess.Popen(
            command, cwd=home, env={**os.environ, "HOME": str(home)}, stdout=output, stderr=output
        )
    try:
        until(
            lambda: "job_runner_registered" in log.read_text() or runner.poll() is not None,
            "a runner",
        )
        assert runner.poll() is None, log.read_text()
        shown = _run(home, [names, "cd ~/shop\n", *blocks[at + 1 :]])
        handled = until(
            lambda: re.search(rf'"job-completed".*"{re.escape(HANDLED)}\d+"', log.read_text()),
            "a handler",
        )
        runner.send_signal(signal.SIGINT)
        assert runner.wait(30) == 0, log.read_text()
    finally:
        if runner.poll() is None:
            runner.kill()
            runner.wait()
    for expected in (
        "shop/jobs.count_primes",
        "primes: 78498",
        "page: True",
        "shipped: order-1: 3 parcels",
        "many: 100",
        "failed: job charge-order-1: JOB_FAILED: CardDeclined: no money for order-1",
        "refused: JOB_ARGUMENTS_INVALID",
        "args.limit: It has to be of the type integer.",
        "asking the bank",
        "1 of 1 requeued",
        "2 passed",
    ):
        assert expected in shown, (expected, shown)
    # Which steps are seen depends on how fast the machine is.
    assert re.search(r"parcels: \{'shipped': [123], 'of': 3\}", shown), shown
    assert re.search(r"^25$", shown, re.M), shown
    assert handled
