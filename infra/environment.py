"""Decides which environment variables reach our processes and their libraries.

A shell of a developer is full of variables for other programs: `PGHOST` of another database,
`TEMPORAL_API_KEY` of Temporal Cloud, `PYTHONPATH` of another project. Libraries read them behind
our back, so that a start hangs or talks to the wrong server. Two rules keep them out:

- What `berth up` starts gets an environment composed from an allow-list (`compose_environment`).
- Every process of ours forgets the variables of libraries that it configures by its own settings
  (`forget_library_variables`).

What each program reads, and what was decided:

- asyncpg, libpq's programs (`pg_isready`, `createdb`, `pg_dump`): `PG*`. Forgotten everywhere; the
  database's URL says all (`sslmode` and `sslrootcert` included).
- temporalio, the program `temporal`: `TEMPORAL_*`. Forgotten everywhere; `BERTH_TEMPORAL_*` say
  all. The program also reads a file in the home folder: the local stack tells it not to.
- prometheus_client: `PROMETHEUS_MULTIPROC_DIR` would have it count in memory-mapped files.
  Forgotten when `infra` is imported, because the library reads it at its own import.
- redis-py and Valkey read none.
- boto3: `AWS_*`. Passed on: it runs only where a setting names a KMS key, a secret or an ECS
  cluster.
- httpx, pip, OpenSSL: proxies and certificates (`HTTPS_PROXY`, `SSL_CERT_FILE` …) are passed on,
  since what reaches the internet needs them; addresses of this machine never go through a proxy.
  `OPENSSL_CONF`, `OPENSSL_MODULES` and `SSLKEYLOGFILE` (it would write session keys to a file) are
  not passed on.
- OpenTelemetry: `OTEL_*` is passed on; it is how a collector's key and the sampler are set.
- Python: `PYTHON*` is not passed on. `PYTHONPATH` would put other code before ours,
  `PYTHONOPTIMIZE` removes assertions, `PYTHONWARNINGS=error` ends processes.
- uvicorn: `WEB_CONCURRENCY`, `FORWARDED_ALLOW_IPS`. Not passed on; `BERTH_API_PROCESSES` and
  `BERTH_TRUSTED_PROXIES` say it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase

#: Patterns of variables that libraries read and that our own settings replace.
REPLACED_BY_SETTINGS = ("PG*", "TEMPORAL_*")

#: Patterns of variables that the processes of `berth up` inherit.
INHERITED = (
    # Where things are, and who runs it.
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "TMPDIR",
    "TEMP",
    "TMP",
    "XDG_*",
    "LD_LIBRARY_PATH",
    # Language, time zone, terminal.
    "LANG",
    "LANGUAGE",
    "LC_*",
    "TZ",
    "TERM",
    "COLORTERM",
    "NO_COLOR",
    "FORCE_COLOR",
    "COLUMNS",
    "LINES",
    # Package indexes, proxies, certificates.
    "PIP_*INDEX*",
    "PIP_TRUSTED_HOST",
    "PIP_PROXY",
    "PIP_CERT",
    "UV_*INDEX*",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    # Read only where our settings ask for AWS, or for traces.
    "AWS_*",
    "OTEL_*",
)

#: Hosts that no proxy is asked for.
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


def compose_environment(source: Mapping[str, str], passed_on: Sequence[str] = ()) -> dict[str, str]:
    """Returns what a process of `berth up` inherits of the environment `source`.

    `passed_on` are more patterns (`BERTH_LOCAL_PASS_ENVIRONMENT`), such as `LD_PRELOAD` or
    `MALLOC_*`. What a pattern of `REPLACED_BY_SETTINGS` fits is never inherited. `BERTH_*` is not
    either: settings are added by the caller.
    """
    patterns = (*INHERITED, *passed_on)
    inherited = {
        name: value
        for name, value in source.items()
        if _fits(name, patterns) and not _fits(name, (*REPLACED_BY_SETTINGS, "BERTH_*"))
    }
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in inherited.get(name, "").split(",") if host]
        if "*" not in hosts:
            inherited[name] = ",".join(
                [*hosts, *(host for host in _THIS_MACHINE if host not in hosts)]
            )
    return inherited


def forget_library_variables(environ: MutableMapping[str, str] = os.environ) -> None:
    """Removes the variables of libraries that our own
    settings replace; each process calls it first."""
    for name in [name for name in environ if _fits(name, REPLACED_BY_SETTINGS)]:
        del environ[name]


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
