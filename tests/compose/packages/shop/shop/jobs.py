"""A user's package, which goes into an image as `docs/how-to/build-a-job-image.md` says."""

from __future__ import annotations

import time
from importlib.metadata import version

import idna
from berth_jobs import context, job

#: Where it lies in the containers of the tests.
LEDGER = "/ledger/ran"
KEYS = ("/keys/application/application.key", "/keys/application/secrets/STRIPE_KEY")


@job(secrets=["STRIPE_KEY"])
def describe(host: str) -> dict[str, str]:
    """Uses a package that the image has for it, and its secret; tries to read keys."""
    seen = {"host": idna.encode(host).decode(), "secret": context().secrets["STRIPE_KEY"]}
    for path in KEYS:
        try:
            with open(path) as file:
                seen[path] = file.read()
        except OSError as error:
            seen[path] = type(error).__name__
    return seen


@job(timeout=60)
def spend(seconds: float) -> str:
    """Must not run twice; the ledger says how often it has."""
    with open(LEDGER, "a") as ledger:
        ledger.write(f"{context().job_id}\n")
    time.sleep(seconds)
    return version("shop")


@job(memory=64 * 1024 * 1024)
def grow(mebibytes: int) -> int:
    held = bytearray(b"1") * (mebibytes << 20)
    time.sleep(10 if mebibytes > 64 else 0)
    return len(held)
