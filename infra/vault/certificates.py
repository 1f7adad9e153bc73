"""Reads when the certificate of an account expires,
in a child process that the file cannot make costly."""

import asyncio
import base64
import contextlib
import json
import signal
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog

from infra.vault import certificate_reader
from worker_runtime.protocol.errors import CertificateExpired, CheckFailed

#: Seconds that a child may take, the wait for its turn included:
#: its CPU time, on a host that is busy.
READ_TIMEOUT_S = 12.0
#: Children of one process at the same time: each may use a core for `certificate_reader.CPU_S`.
_MAX_CHILDREN = 2

log = structlog.get_logger()


class CertificateFileRefused(CheckFailed, code="CERTIFICATE_REFUSED"):
    """The file is not a PKCS#12 certificate, its password is wrong, or opening it takes too much
    work."""


@dataclass(frozen=True)
class ReadCertificate:
    """What a certificate says. `ends` is None where we
    cannot read it and a broker's SDK perhaps can."""

    ends: datetime | None


class CertificateFileReader:
    """Starts the children, not more than some at a time."""

    def __init__(self, timeout_s: float = READ_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(_MAX_CHILDREN)

    async def read(self, certificate: bytes, password: str) -> ReadCertificate:
        """Raises `CertificateFileRefused` for what no SDK can use,
        `CertificateExpired` for what has expired.

        What we cannot read for a reason of our own (a form of PKCS#12 that the library does not
        know, a host that is too busy) is not refused: the worker's login then says when it expires.
        """
        given = base64.b64encode(certificate) + b"\n" + base64.b64encode(password.encode()) + b"\n"
        try:
            async with asyncio.timeout(self._timeout_s), self._turns:
                code, answer = await _run_child(given)
        except (TimeoutError, OSError) as error:
            log.warning("certificate_not_read", error=type(error).__name__)
            return ReadCertificate(None)
        if code in (-signal.SIGXCPU, -signal.SIGKILL) or (code and b"MemoryError" in answer):
            raise CertificateFileRefused(
                "Opening the certificate takes too much CPU or memory. Export it again with "
                "usual settings."
            )
        try:
            reading = json.loads(answer) if code == 0 else {}
        except ValueError:
            reading = {}
        match reading.get("result"):
            case "garbage":
                raise CertificateFileRefused("The certificate is no PKCS#12 file (.pfx, .p12).")
            case "wrong_password":
                raise CertificateFileRefused("The password does not open the certificate.")
            case "read":
                ends = datetime.fromtimestamp(reading["ends"], UTC)
                if ends <= datetime.now(UTC):
                    raise CertificateExpired(f"The certificate expired on {ends:%Y-%m-%d}.")
                return ReadCertificate(ends)
            case _:
                log.warning("certificate_not_read", exit_code=code)
                return ReadCertificate(None)


async def _run_child(given: bytes) -> tuple[int, bytes]:
    """Exit code and output. The child is killed when the caller is cancelled."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        str(Path(certificate_reader.__file__)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={},
    )
    try:
        output, said = await child.communicate(given)
        return child.returncode or 0, said if child.returncode else output
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
