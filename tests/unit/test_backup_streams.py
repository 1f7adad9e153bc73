"""Backups are encrypted as they pass by, and a backup that is not whole is noticed."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from infra.recovery.base_check import BaseCheck
from infra.recovery.encryption import (
    BackupFailed,
    decrypt_stream,
    encrypt_stream,
    make_identity,
    read_identity,
    read_recipients,
)
from infra.recovery.unpack import find_gaps

SIZE = 1024 * 1024
LAST = "000000010000000000000003"


class CountingSource:
    """Gives `size` bytes, and notes the largest number that was asked for at once."""

    def __init__(self, size: int) -> None:
        self._left = size
        self.largest = 0

    def read(self, size: int = -1, /) -> bytes:
        self.largest = max(self.largest, size if size >= 0 else 2**63)
        given = min(size, self._left)
        self._left -= given
        return b"x" * given


def archive(*, damaged: str = "", left_out: str = "", manifest: bool = True) -> bytes:
    """Makes a base backup as `pg_basebackup` streams it, of three files and two of the log."""
    contents = {"PG_VERSION": b"18\n", "base/1/112": b"a" * 100_000, "backup_label": b"START"}
    entries = [
        {"Path": name, "Size": len(data), "Checksum": hashlib.sha256(data).hexdigest()}
        for name, data in contents.items()
    ]
    ranges = [{"Timeline": 1, "Start-LSN": "0/200028", "End-LSN": "0/300100"}]
    text = json.dumps({"Files": entries, "WAL-Ranges": ranges}).encode()[:-1] + b",\n"
    text += f'"Manifest-Checksum": "{hashlib.sha256(text).hexdigest()}"}}'.encode()
    contents |= {f"pg_wal/{name}": b"\0" * SIZE for name in ("000000010000000000000002", LAST)}
    contents |= {"backup_manifest": text} if manifest else {}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in contents.items():
            if name == left_out:
                continue
            data = data[:-1] + b"?" if name == damaged else data
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def test_a_stream_is_encrypted_and_decrypted_in_small_pieces(tmp_path: Path) -> None:
    recipients = read_recipients([make_identity(tmp_path / "identity")])
    source = CountingSource(32 * 1024 * 1024)
    encrypt_stream(source, tmp_path / "made", recipients)
    assert source.largest <= 64 * 1024
    assert (tmp_path / "made").stat().st_mode & 0o077 == 0
    target = io.BytesIO()
    decrypt_stream(tmp_path / "made", target, read_identity(tmp_path / "identity"))
    assert target.getvalue() == b"x" * (32 * 1024 * 1024)


def test_a_source_that_fails_leaves_no_file_and_its_own_error(tmp_path: Path) -> None:
    class Failing:
        def read(self, size: int = -1, /) -> bytes:
            raise ConnectionResetError("the server went away")

    recipients = read_recipients([make_identity(tmp_path / "identity")])
    with pytest.raises(ConnectionResetError):
        encrypt_stream(Failing(), tmp_path / "made", recipients)
    assert [path.name for path in tmp_path.iterdir()] == ["identity"]


@pytest.mark.parametrize("size", [10, 5 * SIZE])
def test_a_full_medium_is_an_error_of_the_operating_system(tmp_path: Path, size: int) -> None:
    """So that the follower of the log waits for room."""
    recipients = read_recipients([make_identity(tmp_path / "identity")])
    (tmp_path / ".made.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        encrypt_stream(CountingSource(size), tmp_path / "made", recipients)
    assert [path.name for path in tmp_path.iterdir()] == ["identity"]


@pytest.mark.parametrize(
    ("names", "gaps"),
    [
        (["000000010000000000000001", "000000010000000000000002"], []),
        (
            ["0000000100000000000000FD", "000000010000000100000001", "00000002.history"],
            [("0000000100000000000000FE", "000000010000000100000000")],
        ),
        # The last file before a change of the timeline is there twice.
        (["000000010000000000000001", "000000020000000000000001"], []),
        # Only the last file may be incomplete.
        (
            [
                "000000010000000000000001",
                "000000010000000000000002.partial",
                "000000010000000000000003",
                "000000010000000000000004.partial",
            ],
            [("000000010000000000000002", "000000010000000000000002")],
        ),
    ],
    ids=["none", "some", "timeline", "partial"],
)
def test_what_the_log_lacks_is_found(names: list[str], gaps: list[tuple[str, str]]) -> None:
    assert find_gaps(names, 16 * SIZE) == gaps


def test_what_is_damaged_or_for_somebody_else_is_not_opened(tmp_path: Path) -> None:
    recipients = read_recipients([make_identity(tmp_path / "identity")])
    make_identity(tmp_path / "other")
    encrypt_stream(io.BytesIO(b"x" * 200_000), tmp_path / "made", recipients)
    with pytest.raises(BackupFailed, match="does not open"):
        decrypt_stream(tmp_path / "made", io.BytesIO(), read_identity(tmp_path / "other"))
    data = (tmp_path / "made").read_bytes()
    for altered in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), data[:70_000]):
        (tmp_path / "made").write_bytes(altered)
        with pytest.raises(BackupFailed, match="damaged"):
            decrypt_stream(tmp_path / "made", io.BytesIO(), read_identity(tmp_path / "identity"))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (archive(), ""),
        (archive(damaged="base/1/112"), "base/1/112 is missing or damaged"),
        (archive(left_out="base/1/112"), "base/1/112 is missing or damaged"),
        (archive(left_out=f"pg_wal/{LAST}"), f"{LAST} of the log is missing"),
        (archive(damaged="backup_manifest"), "not whole"),
        (archive(manifest=False), "ends before its manifest"),
        (archive()[:60_000], "not whole"),
        (b"", "not whole"),
        (b"no archive at all", "not whole"),
    ],
    ids=[
        "whole",
        "damaged",
        "no file",
        "no log",
        "bad manifest",
        "no manifest",
        "cut",
        "empty",
        "no archive",
    ],
)
def test_a_base_backup_that_is_not_whole_is_refused(data: bytes, reason: str) -> None:
    check = BaseCheck(io.BytesIO(data))
    passed = b"".join(iter(lambda: check.read(8192), b""))
    assert passed == data, "all of it passes, whatever it is"
    if not reason:
        check.finish()
        return
    with pytest.raises(BackupFailed, match=reason):
        check.finish()
