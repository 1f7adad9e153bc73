"""What a manifest says of a package's job types, and what it may not hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from infra.berth_jobs import job
from infra.berth_jobs.manifest import (
    MAX_SCHEMA_LEVELS,
    BadManifest,
    build_manifest,
    read_manifest,
)
from tests.support.commands import ROOT


@job(name="manifest.split")
def split(text: str, separator: Literal["\0", ","] = ",") -> None:
    """Splits a text."""


@job(name="manifest.join")
def join(parts: list[str]) -> None:
    """Joins texts at \0."""


def nested_manifest(levels: int) -> bytes:
    """Returns a manifest whose schema is nested this deep."""
    schema = '{"not":' * (levels - 1) + "{}" + "}" * (levels - 1)
    kind = f'{{"name":"shop/jobs.resize","arguments_schema":{schema}}}'
    return f'{{"application":"shop","package":"shop","types":[{kind}]}}'.encode()


@pytest.mark.parametrize("function", [split, join])
def test_a_text_that_postgresql_cannot_store_is_refused_where_the_types_are_described(
    function: Any,
) -> None:
    with pytest.raises(BadManifest, match=r"shop/manifest\.\w+: a text holds the character NUL"):
        build_manifest("shop", [function], "shop")


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    assert read_manifest(nested_manifest(MAX_SCHEMA_LEVELS))
    for levels in (MAX_SCHEMA_LEVELS + 1, 300, 100_000):
        with pytest.raises(BadManifest, match=r"nested more than 32 levels|does not fit"):
            read_manifest(nested_manifest(levels))


#: Modules of the packages, and the distributions that have them.
MODULES = {
    "common/jobs.py": "@job\ndef notify(number: int) -> None: ...",
    "shop_a/jobs.py": "import common.jobs\n@job\ndef resize(number: int) -> None: ...",
    "acme/orders.py": "@job\ndef order(number: int) -> None: ...",
    "acme/bills.py": "@job\ndef bill(number: int) -> None: ...",
    "loose.py": "@job\ndef sweep(number: int) -> None: ...",
}
DISTRIBUTIONS = {
    "common-jobs": ["common/jobs.py"],
    "shop-a": ["shop_a/jobs.py"],
    "acme-orders": ["acme/orders.py"],
    "acme-bills": ["acme/bills.py"],
}


def test_the_package_of_a_type_is_that_of_its_own_function(tmp_path: Path) -> None:
    for path, code in MODULES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(f"from infra.berth_jobs import job\n{code}\n")
    for number, (name, files) in enumerate(DISTRIBUTIONS.items()):
        about = tmp_path / f"{name.replace('-', '_')}-{number}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
        (about / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    modules = ("shop_a.jobs", "acme.orders", "acme.bills", "loose")
    words = [word for module in modules for word in ("--import", module)]
    command = [sys.executable, "-m", "infra.berth_jobs.discovery", "--application", "shop", *words]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=True,
    )
    manifest = read_manifest(done.stdout)
    assert manifest.package == "common-jobs"  # of the first type: runners of earlier releases
    packages = {kind.name: (kind.package, kind.package_version) for kind in manifest.types}
    assert packages == {
        "shop/jobs.notify": ("common-jobs", "0"),
        "shop/jobs.resize": ("shop-a", "1"),
        "shop/orders.order": ("acme-orders", "2"),
        "shop/bills.bill": ("acme-bills", "3"),
        "shop/loose.sweep": ("loose", ""),
    }
