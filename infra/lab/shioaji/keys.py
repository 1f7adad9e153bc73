"""The keys of the lab's accounts at the stand-in,
and the package that puts it in the place of the SDK."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import NameOID

#: The beginning of an API key of the lab; the account's id follows. The real SDK refuses such a key
#: before it asks anybody, so that a worker without the stand-in logs in nowhere.
_KEY_PREFIX = "standin."
#: Shioaji's secret keys are base58 of at least ten characters.
SECRET_KEY = "StandinStandin"  # noqa: S105 - of nothing but a run of the lab
CERTIFICATE_PASSWORD = "standin"  # noqa: S105


def api_key_of(account_id: str) -> str:
    return _KEY_PREFIX + account_id


def account_of(api_key: str) -> str:
    """Returns the account that a key of `api_key_of` belongs to."""
    return api_key.removeprefix(_KEY_PREFIX)


def make_certificate(days: float = 300.0, password: str = CERTIFICATE_PASSWORD) -> bytes:
    """Makes a self-signed certificate in PKCS#12 that expires in so many days."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "A123456789")])
    ends = datetime.now(UTC) + timedelta(days=days)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(ends - timedelta(days=366))
        .not_valid_after(ends)
        .sign(key, hashes.SHA256())
    )
    encryption = serialization.BestAvailableEncryption(password.encode())
    return pkcs12.serialize_key_and_certificates(b"berth", key, certificate, None, encryption)


def write_package(folder: Path, exchange_address: str) -> None:
    """Writes a package `shioaji` into `folder`
    that is the installed SDK with the stand-in as its client."""
    package = folder / "shioaji"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from infra.lab.shioaji.stand_in import stand_in_for_sdk\n"
        f"stand_in_for_sdk(__name__, {exchange_address!r}, {str(folder)!r})\n",
        encoding="utf-8",
    )


@contextmanager
def on_python_path(folder: Path) -> Iterator[None]:
    """Has the processes of a local stack, and their workers,
    look for packages in `folder` first."""
    names = ("PYTHONPATH", "BERTH_LOCAL_PASS_ENVIRONMENT")
    before = {name: os.environ.get(name) for name in names}
    paths = [str(folder), *filter(None, [before["PYTHONPATH"]])]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "BERTH_LOCAL_PASS_ENVIRONMENT": '["PYTHONPATH"]',
    }
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
