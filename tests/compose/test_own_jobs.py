"""A user's package in an image on top of the server's, and the profile `own-jobs`, as the page says
it."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.lab.worker_image import ROOT, ImageBuilder
from tests.support.systems.compose import PATIENCE, ComposeHouse
from tests.support.systems.local import until

pytestmark = [pytest.mark.drill, pytest.mark.timeout(600)]

PAGE = ROOT / "docs" / "how-to" / "build-a-job-image.md"
SECRET = "sk_of_the_shop"
#: Takes the place of an image that cannot be pulled, and of the index of packages.
STAND_IN_PYTHON = """\
FROM {base}
RUN python3 -m venv /opt/python
ENV PATH=/opt/python/bin:$PATH PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels PIP_DISABLE_PIP_VERSION_CHECK=1
COPY wheels /wheels
"""
JOBS = 40


class Shop:
    """The package, its images, and the service that runs it; the commands are the page's."""

    def __init__(self, stack: ComposeHouse, folder: Path) -> None:
        self.stack = stack
        package = Path(__file__).parent / "packages" / "shop"
        self.package = Path(shutil.copytree(package, folder / "package"))
        self.ledger = folder / "ledger"
        self.ledger.mkdir()
        self.ledger.chmod(0o777)
        self.variables = {
            "COMPOSE_PROFILES": "containers,own-jobs",
            "BERTH_JOBS_APPLICATION": "shop",
            "BERTH_JOBS_RUNNERS": "1",
            "SHOP_LEDGER": str(self.ledger),
        }
        self.page = PAGE.read_text(encoding="utf-8")
        self.key = ""

    def build(self, version: str) -> str:
        """Builds the image of a version by the page's Dockerfile; returns its tag."""
        [dockerfile] = re.findall(r"```dockerfile\n(.*?)```", self.page, re.S)
        (self.package / "Dockerfile").write_text(dockerfile)
        project = self.package / "pyproject.toml"
        project.write_text(re.sub(r'version = ".*"', f'version = "{version}"', project.read_text()))
        [command] = re.findall(rf"^docker build -t \S+:{version} \.$", self.page, re.M)
        self.stack.run("sh", "-ec", f"cd {self.package} && {command}")
        return str(command.split()[3])

    def paste(self, first_line: str, **more: str) -> str:
        """Runs the page's block that begins with this."""
        blocks = re.findall(r"```sh\n(.*?)```", self.page, re.S)
        [block] = [block for block in blocks if block.startswith(first_line)]
        return self.run("sh", "-ec", block, **more)

    def run(self, *words: str, **more: str) -> str:
        """Output of a program in the clone, with the variables of the page's `.env`."""
        variables = {**self.variables, **more}
        return self.stack.run(
            "env", *(f"{key}={value}" for key, value in variables.items()), *words
        )

    def enqueue(self, *jobs: dict[str, Any]) -> list[str]:
        body = {"jobs": [{"type": f"shop/jobs.{job['name']}", "args": job["args"]} for job in jobs]}
        answer = self.stack.call("POST", "/v1/jobs/batch", self.key, json=body)
        assert answer.status_code == 202, answer.text
        return [job["id"] for job in answer.json()["jobs"]]

    def ended(self, job_id: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            answer = self.stack.call("GET", f"/v1/jobs/{job_id}?wait=20", self.key)
            found: dict[str, Any] = answer.json()
            return found if found["ended"] else None

        return until(look, f"the end of {job_id}", PATIENCE)

    def ran(self) -> Counter[str]:
        path = self.ledger / "ran"
        return Counter(path.read_text().split() if path.exists() else [])


@pytest.fixture(scope="module")
def shop(stack: ComposeHouse, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """The service runs version 1.0 of the package."""
    folder = tmp_path_factory.mktemp("shop")
    builder = ImageBuilder(stack.daemon.host)
    context = folder / "python"
    shutil.copytree(builder.wheels(["server", "setuptools"]), context / "wheels")
    (context / "Dockerfile").write_text(STAND_IN_PYTHON.format(base=builder.base()))
    stack.run(
        "docker", "build", "--quiet", "--network=none", "-t", "python:3.11-slim", str(context)
    )
    shop = Shop(stack, folder)
    shop.variables["BERTH_JOBS_IMAGE"] = shop.build("1.0")
    (stack.clone / "stripe.key").write_text(f"{SECRET}\n")
    shop.paste("docker run --rm -e PYTHONPATH=/opt/shop")
    types = shop.paste("docker compose run --rm -T prepare berth jobs application add shop")
    assert "shop/jobs.spend" in types
    wanted = {"role": "operator", "label": "shop", "scopes": ["jobs:shop"]}
    shop.key = stack.call("POST", "/v1/api-keys", json=wanted).json()["api_key"]
    yield shop
    shop.run("docker", "compose", "rm", "--stop", "--force", "jobs-own")


def test_a_job_runs_in_the_image_with_its_packages_and_its_secret_and_reads_no_key(
    shop: Shop,
) -> None:
    [described, small, large] = shop.enqueue(
        {"name": "describe", "args": {"host": "bücher.example"}},
        {"name": "grow", "args": {"mebibytes": 30}},
        {"name": "grow", "args": {"mebibytes": 300}},
    )
    seen = shop.ended(described)
    assert seen["value"] == {
        "host": "xn--bcher-kva.example",
        "secret": SECRET,
        "/keys/application/application.key": "PermissionError",
        "/keys/application/secrets/STRIPE_KEY": "PermissionError",
    }, seen
    assert shop.ended(small)["value"] == 30 << 20
    assert shop.ended(large)["failure"]["code"] == "JOB_MEMORY_EXCEEDED"


def test_a_rollout_while_jobs_run_loses_and_doubles_none(shop: Shop) -> None:
    shop.build("1.1")
    jobs = shop.enqueue(*[{"name": "spend", "args": {"seconds": 2.0}}] * JOBS)
    until(lambda: len(shop.ran()) >= 8, "running jobs", PATIENCE)
    began = time.monotonic()
    [rollout] = re.findall(r"^BERTH_JOBS_IMAGE=\S+ (docker compose up .*)$", shop.page, re.M)
    shop.run("sh", "-ec", rollout, BERTH_JOBS_IMAGE="berth-shop-jobs:1.1")
    ended = [shop.ended(job_id) for job_id in jobs]
    assert [job["state"] for job in ended] == ["done"] * JOBS, time.monotonic() - began
    assert shop.ran() == Counter(jobs)
    versions = Counter(job["value"] for job in ended)
    assert versions.keys() == {"1.0", "1.1"}
    assert versions["1.0"] >= 8
