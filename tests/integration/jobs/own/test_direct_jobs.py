"""A direct producer's jobs run like those of the API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from infra.berth_jobs import job
from infra.berth_jobs.direct import DirectProducer
from tests.support.jobs.application import KEYS, NAME, Application


class PricedLine(msgspec.Struct):
    article: str
    pieces: Annotated[int, msgspec.Meta(ge=1)]


@job(name="shop_jobs.total")
def total(lines: list[PricedLine], factor: float = 1.0) -> float:
    """What the application's package declares, too."""
    return factor * len(lines)


@job(name="shop_jobs.survive", idempotent=True)
def survive(ledger: str, until: str = "", kill: str = "") -> int:
    """What the application's package declares, too."""
    return 0


@pytest.fixture
def producer(shop: Application, tmp_path: Path) -> Any:
    key_file = tmp_path / "shop.key"
    key_file.write_bytes(msgspec.json.encode(KEYS))
    key_file.chmod(0o600)
    with DirectProducer(shop.url, key_file, application=NAME, use_login=False) as producer:
        yield producer


def test_a_direct_job_runs_with_its_arguments(shop: Application, producer: DirectProducer) -> None:
    sent = producer.enqueue(total, [PricedLine("a", 2), PricedLine("b", 3)], factor=2.0)
    assert shop.value(sent.id) == 10.0


def test_many_direct_jobs_run_once_each(shop: Application, producer: DirectProducer) -> None:
    ledger = shop.path("direct")
    sent = producer.enqueue_many(producer.call(survive, ledger) for _ in range(50))
    for each in sent:
        assert shop.result(each.id).failure is None
    assert len(shop.lines("direct")) == 50
