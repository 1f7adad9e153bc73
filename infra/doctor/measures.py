"""Measures what `berth doctor` and the alerts check, each in one way, and says from which value
on it is wrong."""

import os
import resource
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from datetime import time as time_of_day
from pathlib import Path
from typing import Any

from cryptography import x509
from redis.asyncio import Redis
from sqlalchemy import make_url, text
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from infra.market.calendar import HOME_ZONE, Calendar
from infra.settings import Settings
from infra.valkey.client import read_clock
from infra.valkey.memory import REFUSED_ABOVE_PERMILLE, MemoryUse
from infra.vault.jwt import expiry_of

#: Seconds that a clock may be off. NTP keeps clocks within milliseconds.
MAX_CLOCK_OFFSET_S = 1.0
#: Bytes. `berth up` does not start with less than half of it.
MIN_DISK_FREE_BYTES = 1024**3
#: Of the places for files on a disk.
MIN_INODES_FREE_RATIO = 0.01
#: Of a limit on open files or connections.
MAX_LIMIT_USED_RATIO = 0.8
#: Of Valkey's memory: beyond it new orders are refused.
MAX_MEMORY_USED_RATIO = REFUSED_ABOVE_PERMILLE / 1000
#: Linux's default for a process. PostgreSQL, Valkey and the API need a file for each connection.
MIN_OPEN_FILES = 1024
#: The holidays of a year are published about three months before it.
CALENDAR_WARNING_S = 60 * 86_400
CERTIFICATE_WARNING_S = 14 * 86_400
#: How often a clock is read; the quickest answer counts.
_CLOCK_READS = 3

_DATABASE_CLOCK = text("select extract(epoch from clock_timestamp())::float8")
_DATABASE_CONNECTIONS = text(
    "select count(*)::float8 / current_setting('max_connections')::float8 from pg_stat_activity"
    " where backend_type = 'client backend'"
)


@dataclass(frozen=True)
class ValkeyState:
    """What Valkey says of itself (INFO)."""

    #: What it does when its memory is full.
    policy: str
    appends: bool
    #: Which of its ways to save failed last time.
    failed_saves: tuple[str, ...]
    replicas: int
    memory: MemoryUse
    connections_ratio: float

    @classmethod
    def of(cls, info: dict[str, Any]) -> "ValkeyState":
        saves = {
            "append-only file": info.get("aof_last_write_status"),
            "rewrite of the append-only file": info.get("aof_last_bgrewrite_status"),
            "snapshot": info.get("rdb_last_bgsave_status"),
        }
        return cls(
            policy=str(info.get("maxmemory_policy", "")),
            appends=bool(info.get("aof_enabled")),
            failed_saves=tuple(name for name, status in saves.items() if status == "err"),
            replicas=int(info.get("connected_slaves", 0)),
            memory=MemoryUse.of(info),
            connections_ratio=int(info.get("connected_clients", 0))
            / max(1, int(info.get("maxclients", 1))),
        )

    @property
    def evicts(self) -> bool:
        return self.policy not in ("noeviction", "")

    @property
    def is_kept(self) -> bool:
        """False if a restart loses everything."""
        return self.appends or self.replicas > 0


async def read_valkey_state(client: Redis) -> ValkeyState:
    """Raises `RedisError`."""
    return ValkeyState.of(await client.info())


async def clock_offset(read: Callable[[], Awaitable[float]]) -> float:
    """Returns by how many seconds a server's clock differs from this machine's, at least.

    The time that the answer took is in the server's favour.
    """
    least = float("inf")
    for _ in range(_CLOCK_READS):
        asked = time.time()
        theirs = await read()
        answered = time.time()
        distance = max(asked - theirs, theirs - answered, 0.0)
        least = min(least, distance)
    return least


async def valkey_clock_offset(client: Redis) -> float:
    """Measures `clock_offset` of Valkey. Raises `RedisError`."""

    async def read() -> float:
        return await read_clock(client) / 1000

    # It counts in whole milliseconds.
    offset = await clock_offset(read)
    return offset if offset > 0.001 else 0.0


async def database_clock_offset(connection: AsyncConnection | AsyncSession) -> float:
    """Measures `clock_offset` of PostgreSQL. Raises SQLAlchemy's errors."""

    async def read() -> float:
        return float(await connection.scalar(_DATABASE_CLOCK) or 0.0)

    return await clock_offset(read)


async def database_connections_ratio(connection: AsyncConnection | AsyncSession) -> float:
    """Returns the share of PostgreSQL's connections that are taken. Raises SQLAlchemy's errors."""
    return float(await connection.scalar(_DATABASE_CONNECTIONS) or 0.0)


@dataclass(frozen=True)
class DiskSpace:
    """The disk under a folder of data."""

    folder: Path
    free_bytes: int
    inodes_free_ratio: float

    @property
    def is_low(self) -> bool:
        return (
            self.free_bytes < MIN_DISK_FREE_BYTES or self.inodes_free_ratio < MIN_INODES_FREE_RATIO
        )


def read_disks(settings: Settings) -> list[DiskSpace]:
    """Returns the disks of the data folder,
    of all that lies in it and of the key files; each disk once.

    A host without a data folder, such as one that runs
    only an API in a container, has the key files.
    """
    top = settings.data_dir.absolute()
    keys = (
        settings.orchestrator_key_dir,
        settings.message_key_file.parent,
        settings.api_secret_file.parent,
    )
    try:
        inside = sorted(path for path in top.iterdir() if path.is_dir())
    except OSError:
        inside = []
    disks: dict[int, DiskSpace] = {}
    for folder in (top, *inside, *(key.absolute() for key in keys)):
        try:
            device, status = folder.stat().st_dev, os.statvfs(folder)
            free = shutil.disk_usage(folder).free
        except OSError:  # it is not on this host
            continue
        inodes = status.f_favail / status.f_files if status.f_files else 1.0
        disks.setdefault(device, DiskSpace(folder, free, inodes))
    return list(disks.values())


def open_files_ratio(pid: int | str = "self") -> float:
    """Returns the share of its limit of open files
    that a process has open; 0 if nobody may know."""
    try:
        count = len(os.listdir(f"/proc/{pid}/fd"))
        lines = Path(f"/proc/{pid}/limits").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    soft = next(line.split()[3] for line in lines if line.startswith("Max open files"))
    return count / int(soft) if soft.isdigit() and int(soft) else 0.0


def open_files_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def calendar_end(calendar: Calendar) -> float:
    """Returns the Unix time after whose day the holidays of a market are unknown."""
    day = calendar.first_end + timedelta(days=1)
    return datetime.combine(day, time_of_day(), HOME_ZONE).timestamp()


def certificate_files(settings: Settings) -> dict[str, str]:
    """Returns the files of certificates that the settings name, by the variable of the setting."""
    named = {f"BERTH_{name.upper()}": getattr(settings, name) for name in _CERTIFICATE_FILES}
    for name, parameters in _CERTIFICATES_IN_URLS.items():
        try:
            url = str(getattr(settings, name))
            query = make_url(url).query if url else {}
        except (ArgumentError, ValueError):  # another check says so
            continue
        for parameter in parameters:
            named[f"BERTH_{name.upper()} ({parameter})"] = str(query.get(parameter, ""))
    return {setting: path for setting, path in named.items() if path not in ("", "system")}


_CERTIFICATE_FILES = ("temporal_ca_file", "temporal_cert_file")
_CERTIFICATES_IN_URLS = {
    "database_url": ("sslrootcert",),
    "database_owner_url": ("sslrootcert",),
    "valkey_url": ("ssl_ca_certs", "ssl_certfile"),
    "worker_valkey_url": ("ssl_ca_certs",),
}


def certificate_end(path: str) -> float:
    """Returns the Unix time at which the first
    certificate of a file ends; 0 if it cannot be read."""
    try:
        certificates = x509.load_pem_x509_certificates(Path(path).read_bytes())
        return min(certificate.not_valid_after_utc.timestamp() for certificate in certificates)
    except (OSError, ValueError):
        return 0.0


def certificate_ends(settings: Settings) -> dict[str, float]:
    """Returns when the certificates, and the JWT for Temporal, end that the settings name.

    In Unix seconds, by the variable of the setting; 0: the file cannot be read. An API key that is
    no JWT has no end that is known here.
    """
    ends = {setting: certificate_end(path) for setting, path in certificate_files(settings).items()}
    if path := settings.temporal_api_key_file:
        with suppress(OSError):
            if end := expiry_of(Path(path).read_text(encoding="ascii", errors="replace").strip()):
                ends["BERTH_TEMPORAL_API_KEY_FILE"] = end
    return ends


def day_of(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")
