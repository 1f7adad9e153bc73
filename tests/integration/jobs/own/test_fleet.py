"""A fleet that the settings make one of an application, as compose's service `jobs-own` is."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from infra.berth_jobs.options import JobDefaults, JobOptions
from infra.compose import health
from infra.jobs import fleet
from infra.settings import Settings
from tests.support.jobs.application import KEYS, NAME, PACKAGES, TAG, Application
from tests.support.jobs.runners import PATIENCE
from tests.support.waiting import eventually
from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.protocol import keys as job_keys


def _secret(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_fleet_serves_the_application_that_its_settings_name(shop: Application) -> None:
    for runner in shop.runners:  # this fleet alone takes what comes now
        runner.send(signal.SIGTERM)
        runner.wait()
    key_file = _secret(shop.folder / "shop.key", msgspec.json.encode(KEYS).decode())
    secrets = shop.folder / "secrets"
    secrets.mkdir()
    _secret(secrets / "STRIPE_KEY", "sk_from_a_file\n")
    _secret(secrets / ".ignored", "x")
    environment = {
        "BERTH_VALKEY_URL": shop.url,
        "BERTH_JOBS_RUNNER": "own",
        "BERTH_JOBS_RUNNERS": "1-2",
        "BERTH_JOBS_APPLICATION": NAME,
        "BERTH_JOBS_MODULES": json.dumps(["shop_jobs"]),
        "BERTH_JOBS_PATH": json.dumps([PACKAGES]),
        "BERTH_JOBS_KEY_FILE": str(key_file),
        "BERTH_JOBS_SECRETS_DIR": str(secrets),
        "BERTH_JOBS_RUNNER_TTL": "70",
        "BERTH_JOBS_TIMEOUT_MARGIN": "11",
        "BERTH_JOBS_TIMEOUT": "66",
        "BERTH_JOBS_ATTEMPTS": "4",
        "BERTH_JOBS_RETRY_DELAY": "7",
        "BERTH_JOBS_RESULT_TTL": "88",
    }
    command = [*shop.before, sys.executable, "-m", "infra.jobs.fleet"]
    with subprocess.Popen(command, env={**os.environ, **environment}) as process:
        try:
            job_id = shop.add("charge")
            assert "sk_from_a_file" in json.dumps(shop.value(job_id))
            host = socket.gethostname()
            eventually(
                lambda: health.is_registered(shop.url, "own", host, 60.0, TAG), "a healthy runner"
            )
            assert not health.is_registered(shop.url, "own", host, 60.0)
            [runner_id] = shop.beats()
            eventually(
                lambda: 0 < _seconds_to_live(shop, runner_id) <= 70, "an idle runner's entry"
            )
            # A job's timeout and the margin beyond it count if they are longer.
            gate = shop.path("fleet-gate")
            long = shop.add("once", JobOptions(timeout_s=100), number=7, until=gate)
            eventually(
                lambda: 100 < _seconds_to_live(shop, runner_id) <= 111,
                "an entry that outlives the job",
            )
            shop.open("fleet-gate")
            shop.value(long)
            # Handlers of failures are the only jobs that runners enqueue.
            failed = shop.add("doomed", why="no more")
            pattern = job_keys.result(TAG, f"{failed}.failed.*")
            [key] = eventually(lambda: shop.client.execute("KEYS", pattern), "a handled failure")
            assert 0 < shop.client.execute("TTL", key) <= 88
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0


def _seconds_to_live(shop: Application, runner: str) -> int:
    return int(shop.client.execute("TTL", job_keys.runner(TAG, runner)))


def test_the_numbers_of_the_settings_are_those_that_the_documents_name() -> None:
    settings = Settings()
    assert (settings.jobs_runner_ttl, settings.jobs_timeout_margin) == (420, 60)
    assert settings.job_defaults == JobDefaults(
        timeout=180.0, attempts=10, retry_delay=120.0, result_ttl=500
    )
    job = JobDefaults()
    assert (job.timeout, job.attempts, job.retry_delay, job.result_ttl) == (180.0, 10, 120.0, 500)


def test_its_keys_are_out_of_the_jobs_reach_and_a_wrong_folder_is_refused(tmp_path: Path) -> None:
    key_file = _secret(tmp_path / "shop.key", msgspec.json.encode(KEYS).decode())
    settings = Settings(
        jobs_application=NAME,
        jobs_key_file=str(key_file),
        message_key_file=tmp_path / "none" / "message.key",
        mail_host="mail.example",  # a fleet of own types gets no other tier's outlet
    )
    config = msgspec.json.decode(fleet.runner_config(settings), type=RunnerConfig)
    assert config.own is not None
    assert (config.tag, config.own.key_files, config.mail) == (TAG, (str(key_file),), None)
    wrong = settings.model_copy(update={"jobs_secrets_dir": str(tmp_path / "nowhere")})
    with pytest.raises(fleet.JobSecretRefused, match="there is no folder"):
        fleet.runner_config(wrong)
