"""Few variables of a shell reach the processes of the local system and our libraries."""

from __future__ import annotations

import pytest

from infra.environment import compose_environment, forget_library_variables

INHERITED = (
    "PATH",
    "HOME",
    "LANG",
    "LC_TIME",
    "TZ",
    "TMPDIR",
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "HTTPS_PROXY",
    "https_proxy",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "AWS_PROFILE",
    "OTEL_EXPORTER_OTLP_HEADERS",
)


@pytest.mark.parametrize("name", INHERITED)
def test_what_programs_need_of_their_shell_is_inherited(name: str) -> None:
    assert compose_environment({name: "value"})[name] == "value"


FOREIGN = (
    "PGHOST",
    "PGSERVICE",
    "PGSSLMODE",
    "TEMPORAL_API_KEY",
    "TEMPORAL_PROFILE",
    "PYTHONPATH",
    "PYTHONWARNINGS",
    "PYTHONOPTIMIZE",
    "OPENSSL_CONF",
    "SSLKEYLOGFILE",
    "LD_PRELOAD",
    "PIP_USER",
    "WEB_CONCURRENCY",
    "FORWARDED_ALLOW_IPS",
    "BERTH_POOL_TARGET",
    "DATABASE_URL",
    "REDIS_URL",
)


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_meant_for_other_programs_is_not_inherited(name: str) -> None:
    assert name not in compose_environment({name: "value"})


def test_a_setting_passes_more_variables_on_but_none_that_our_settings_replace() -> None:
    shell = {"LD_PRELOAD": "jemalloc.so", "MALLOC_ARENA_MAX": "2", "PGHOST": "db"}
    passed = compose_environment(shell, ["LD_PRELOAD", "MALLOC_*", "PG*"])
    assert {name: passed.get(name) for name in shell} == {**shell, "PGHOST": None}


@pytest.mark.parametrize(
    ("given", "composed"),
    [
        ({}, "127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "corp.example"}, "corp.example,127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "localhost,10.0.0.0/8"}, "localhost,10.0.0.0/8,127.0.0.1,::1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_no_proxy_is_asked_for_addresses_of_this_machine(
    given: dict[str, str], composed: str
) -> None:
    assert compose_environment({"HTTP_PROXY": "http://proxy:3128", **given})["NO_PROXY"] == composed


def test_a_process_forgets_the_variables_of_libraries_that_its_settings_replace() -> None:
    shell = {"PGHOST": "db", "TEMPORAL_TLS": "1", "PATH": "/bin", "BERTH_TEMPORAL_TLS": "false"}
    forget_library_variables(shell)
    assert shell == {"PATH": "/bin", "BERTH_TEMPORAL_TLS": "false"}
