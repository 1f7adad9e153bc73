"""A child process, which no file can make costly, reads when a certificate expires."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import PrivateFormat, pkcs12

from infra.lab.shioaji.keys import make_certificate
from infra.vault import certificate_reader
from infra.vault.certificates import CertificateFileReader, CertificateFileRefused
from worker_runtime.protocol.errors import CertificateExpired

PASSWORD = "Pässword 密碼"


@pytest.fixture
def reader() -> CertificateFileReader:
    return CertificateFileReader(timeout_s=60.0)  # on a host that is busy with other tests


async def days_left(
    reader: CertificateFileReader, data: bytes, password: str = PASSWORD
) -> float | None:
    ends = (await reader.read(data, password)).ends
    return None if ends is None else (ends - datetime.now(UTC)) / timedelta(days=1)


def der(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes([tag, 0x80 | len(length)]) + length + content


def with_iterations(data: bytes, count: int) -> bytes:
    """Returns the file, changed to say that its password takes N rounds to check."""
    outer, _ = certificate_reader._element(data, 0x30)
    version, rest = certificate_reader._element(outer, 0x02)
    info, rest = certificate_reader._element(rest, 0x30)
    mac, _ = certificate_reader._element(rest, 0x30)
    digest, rest = certificate_reader._element(mac, 0x30)
    salt, _ = certificate_reader._element(rest, 0x04)
    costly = der(0x30, digest) + der(0x04, salt) + der(0x02, count.to_bytes(4))
    return der(0x30, der(0x02, version) + der(0x30, info) + der(0x30, costly))


def old_certificate(days: float) -> bytes:
    """Makes a certificate as browsers and Windows exported it for years: 3DES and SHA-1."""
    modern = pkcs12.load_pkcs12(make_certificate(days, PASSWORD), PASSWORD.encode())
    assert modern.cert is not None
    protection = (
        PrivateFormat.PKCS12.encryption_builder()
        .kdf_rounds(2000)
        .key_cert_algorithm(pkcs12.PBES.PBESv1SHA1And3KeyTripleDESCBC)
        .hmac_hash(hashes.SHA1())  # noqa: S303 - what such files have
        .build(PASSWORD.encode())
    )
    key = modern.key
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    certificate: x509.Certificate = modern.cert.certificate
    return pkcs12.serialize_key_and_certificates(b"old", key, certificate, None, protection)


async def test_the_end_of_a_certificate_is_read_with_its_password(
    reader: CertificateFileReader,
) -> None:
    for data in (make_certificate(20, PASSWORD), old_certificate(20)):
        days = await days_left(reader, data)
        assert days is not None
        assert 19.9 < days <= 20


async def test_a_wrong_password_and_a_file_without_a_certificate_are_refused(
    reader: CertificateFileReader,
) -> None:
    good = make_certificate(20, PASSWORD)
    for password in ("Pässword", "", "x" * 256):
        with pytest.raises(CertificateFileRefused, match="password does not open"):
            await reader.read(good, password)
    for data in (
        b"certificate",
        good[:-1],
        b"\x30\x03\x02\x01\x02",
        b"\x30\x84\xff\xff\xff\xff",
        b"\x30",
    ):
        with pytest.raises(CertificateFileRefused, match="no PKCS#12"):
            await reader.read(data, PASSWORD)


async def test_one_that_has_expired_is_refused(reader: CertificateFileReader) -> None:
    with pytest.raises(CertificateExpired):
        await reader.read(make_certificate(-1, PASSWORD), PASSWORD)


async def test_a_form_that_we_cannot_read_is_not_refused(reader: CertificateFileReader) -> None:
    """BER without lengths, and a PKCS#12 without a MAC: a broker's SDK may know more than our
    library."""
    inside = der(0x02, b"\x03") + der(
        0x30, der(0x06, bytes.fromhex("2a864886f70d010702")) + b"\xa0\x00"
    )
    assert await days_left(reader, der(0x30, inside)) is None
    assert await days_left(reader, b"\x30\x80" + inside + b"\0\0") is None


async def test_a_file_that_asks_for_hours_of_work_costs_some_seconds_of_cpu(
    reader: CertificateFileReader,
) -> None:
    began = time.process_time()
    with pytest.raises(CertificateFileRefused, match="too much CPU"):
        await reader.read(with_iterations(make_certificate(20, PASSWORD), 2**31 - 1), PASSWORD)
    assert time.process_time() - began < 2.0  # of this process


async def test_a_host_that_is_too_busy_refuses_nobody() -> None:
    hurried = CertificateFileReader(timeout_s=0.0)
    assert await days_left(hurried, make_certificate(20, PASSWORD)) is None


def test_the_child_has_little_memory_and_writes_no_files(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(certificate_reader.__file__).parent)!r})\n"
        "import certificate_reader, signal; certificate_reader.limit_resources()\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try: bytearray(1 << 30)\n"
        "except MemoryError: print('no memory')\n"
        f"try: open({str(tmp_path / 'x')!r}, 'w').write('x' * 100000)\n"
        "except OSError: print('no file')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["no memory", "no file"], done.stderr
