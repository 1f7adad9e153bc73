"""Headers of trusted proxies say who sent a request, over which scheme, to which host."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from api.http.limits import limited_address
from api.http.proxies import HOST, UNKNOWN_SOURCE, ForwardedHeader, TrustedProxies
from infra.networks import is_within, parse_network
from infra.settings import Settings

PROXIES = ("10.0.0.0/8", "::1/128", "2001:db8:ff::/48")
SENDER = "52.89.214.238"


def resolved(
    *headers: tuple[str, str],
    peer: str = "10.0.0.1",
    proxies: tuple[str, ...] = PROXIES,
    header: ForwardedHeader = "X-Forwarded-For",
) -> dict[str, Any]:
    """Returns the scope of a request with these headers, as routes get it."""
    lines = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    scope: dict[str, Any] = {"client": (peer, 41234), "scheme": "http", "headers": lines}
    TrustedProxies(proxies, header).resolve(scope)
    return scope


def source_of(*values: str, peer: str = "10.0.0.1", **options: Any) -> str:
    name = options.get("header", "X-Forwarded-For")
    source: str = resolved(*((name, value) for value in values), peer=peer, **options)["client"][0]
    return source


@pytest.mark.parametrize(
    ("peer", "values", "expected"),
    [
        ("203.0.113.9", [], "203.0.113.9"),
        ("203.0.113.9", [SENDER], "203.0.113.9"),  # no proxy of ours wrote that
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", [SENDER], SENDER),
        # The client invented the first one.
        ("10.0.0.1", [f"{SENDER}, 203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", [SENDER, "10.0.0.2"], SENDER),
        ("10.0.0.1", [SENDER, "203.0.113.9", "10.0.0.2"], "203.0.113.9"),
        ("10.0.0.1", ["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        ("::ffff:10.0.0.1", [SENDER], SENDER),
        ("10.0.0.1", ["::ffff:52.89.214.238"], SENDER),
        ("10.0.0.1", [f"{SENDER}:41234"], SENDER),
        ("10.0.0.1", [f"{SENDER}:41234, 10.0.0.2:80"], SENDER),
        ("10.0.0.1", ["2001:db8::1"], "2001:db8::1"),
        ("10.0.0.1", ["[2001:db8::1]"], "2001:db8::1"),
        ("10.0.0.1", ["[2001:db8::1]:443"], "2001:db8::1"),
        ("10.0.0.1", ['"[2001:db8::1]:443"'], "2001:db8::1"),
        ("10.0.0.1", ["[::ffff:52.89.214.238]:443"], SENDER),
        ("10.0.0.1", ["fe80::1%eth0"], "fe80::1"),
        ("10.0.0.1", [f"{SENDER}, [2001:db8:ff::7]:443"], SENDER),
        ("10.0.0.1", ["unknown"], UNKNOWN_SOURCE),
        ("10.0.0.1", ["_hidden"], UNKNOWN_SOURCE),
        ("10.0.0.1", [""], UNKNOWN_SOURCE),
        ("10.0.0.1", [f"{SENDER},"], UNKNOWN_SOURCE),
        ("10.0.0.1", [f"{SENDER}, unknown"], UNKNOWN_SOURCE),
        ("10.0.0.1", ["2001:db8::1]:443"], UNKNOWN_SOURCE),
        ("10.0.0.1", ["52.89.214.238:41234:1"], UNKNOWN_SOURCE),
        ("10.0.0.1", ["52.89.214.0238"], UNKNOWN_SOURCE),
        ("10.0.0.1", ["52.89.214.238/32"], UNKNOWN_SOURCE),
        ("10.0.0.1", ["<script>"], UNKNOWN_SOURCE),
    ],
)
def test_the_source_is_the_last_address_that_no_proxy_of_ours_has(
    peer: str, values: list[str], expected: str
) -> None:
    assert source_of(*values, peer=peer) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["for=52.89.214.238"], SENDER),
        (["For=52.89.214.238;Proto=https;by=10.0.0.1"], SENDER),
        (['for="52.89.214.238:41234"'], SENDER),
        (["for=52.89.214.238:41234"], SENDER),
        (['for="[2001:db8::1]:443"'], "2001:db8::1"),
        (['for="[2001:db8::1]:_port"'], "2001:db8::1"),
        (["for=[2001:db8::1]"], "2001:db8::1"),
        (['for=203.0.113.9, for=52.89.214.238;by="[::1]"'], SENDER),
        (["for=52.89.214.238, for=10.0.0.2"], SENDER),
        (["for=52.89.214.238", "for=10.0.0.2;proto=http"], SENDER),
        (['for="5\\2.89.214.238"'], SENDER),
        (['host="a,b;c=d";for=52.89.214.238'], SENDER),
        (["for=unknown"], UNKNOWN_SOURCE),
        (["for=_hidden"], UNKNOWN_SOURCE),
        (["proto=https"], UNKNOWN_SOURCE),
        (["for=203.0.113.9;for=52.89.214.238"], UNKNOWN_SOURCE),  # which of both is meant?
        (["for=52.89.214.238;="], UNKNOWN_SOURCE),
        (["52.89.214.238"], UNKNOWN_SOURCE),
        # A client leaves a quote open, so that what the proxy appended would become a part of its
        # own text.
        (['for=203.0.113.9;by=", for=52.89.214.238'], SENDER),
        (['for=203.0.113.9;by=", for="[2001:db8::1]";proto=https'], "2001:db8::1"),
    ],
)
def test_forwarded_is_read_as_rfc_7239_says(values: list[str], expected: str) -> None:
    assert source_of(*values, header="Forwarded") == expected


def test_the_header_that_our_proxies_do_not_write_is_ignored() -> None:
    both = (("Forwarded", f"for={SENDER};proto=https"), ("X-Forwarded-For", "203.0.113.9"))
    assert resolved(*both)["client"][0] == "203.0.113.9"
    assert resolved(*both)["scheme"] == "http"
    assert resolved(*both, header="Forwarded")["client"][0] == SENDER
    only_other = (
        ("X-Forwarded-For", SENDER),
        ("X-Forwarded-Proto", "https"),
        ("X-Forwarded-Host", "evil"),
    )
    scope = resolved(*only_other, header="Forwarded")
    assert (scope["client"][0], scope["scheme"], HOST in scope) == ("10.0.0.1", "http", False)


def test_nobody_is_believed_without_proxies_of_ours() -> None:
    said = (
        ("X-Forwarded-For", SENDER),
        ("X-Forwarded-Proto", "https"),
        ("X-Forwarded-Host", "evil"),
    )
    for scope in (resolved(*said, proxies=()), resolved(*said, peer="203.0.113.9")):
        assert (scope["client"][1], scope["scheme"], HOST in scope) == (41234, "http", False)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([("X-Forwarded-Proto", "https")], "https"),
        ([("X-Forwarded-Proto", "HTTPS"), ("X-Forwarded-For", SENDER)], "https"),
        ([("X-Forwarded-Proto", "https"), ("X-Forwarded-For", f"{SENDER}, 10.0.0.2")], "https"),
        (
            [("X-Forwarded-Proto", "https, http"), ("X-Forwarded-For", f"{SENDER}, 10.0.0.2")],
            "https",
        ),
        (
            [("X-Forwarded-Proto", "https, http"), ("X-Forwarded-For", f"203.0.113.9, {SENDER}")],
            "http",
        ),
        ([("X-Forwarded-Proto", "gopher"), ("X-Forwarded-For", SENDER)], "http"),
        ([("X-Forwarded-For", SENDER)], "http"),
    ],
)
def test_the_scheme_is_the_one_of_the_hop_that_counts(
    headers: list[tuple[str, str]], expected: str
) -> None:
    assert resolved(*headers)["scheme"] == expected


def test_forwarded_names_scheme_and_host_of_its_hop() -> None:
    value = (
        f'for=203.0.113.9;proto=http, for={SENDER};proto=https;host="berth.example:8443", '
        "for=10.0.0.2"
    )
    scope = resolved(("Forwarded", value), header="Forwarded")
    assert (scope["client"][0], scope["scheme"], scope[HOST]) == (
        SENDER,
        "https",
        "berth.example:8443",
    )


@pytest.mark.parametrize("proxy", ["::ffff:10.0.0.0/104", "::ffff:10.0.0.1"])
def test_a_proxy_may_be_written_as_mapped_into_ipv6(proxy: str) -> None:
    settings = Settings(trusted_proxies=(proxy,))
    for peer in ("10.0.0.1", "::ffff:10.0.0.1"):
        assert source_of(SENDER, peer=peer, proxies=settings.trusted_proxies) == SENDER


@pytest.mark.parametrize("proxy", ["10.0.0.1/8", "localhost", "", "10.0.0.0/33", "unknown"])
def test_a_proxy_that_is_not_a_network_is_refused(proxy: str) -> None:
    with pytest.raises(ValidationError, match="trusted_proxies"):
        Settings(trusted_proxies=(proxy,))


def test_a_source_of_a_webhook_may_be_written_as_mapped_into_ipv6() -> None:
    networks = [parse_network("::ffff:52.89.214.238", strict=False)]
    assert is_within(SENDER, networks)
    assert not is_within(UNKNOWN_SOURCE, [parse_network("0.0.0.0/0"), parse_network("::/0")])


@given(st.lists(st.text(alphabet=st.characters(max_codepoint=255)), max_size=4), st.booleans())
def test_whatever_a_client_sends_the_address_that_our_proxy_appends_counts(
    invented: list[str], forwarded: bool
) -> None:
    header: ForwardedHeader = "Forwarded" if forwarded else "X-Forwarded-For"
    appended = f'for="{SENDER}:41234"' if forwarded else f"{SENDER}:41234"
    on_one_line = ", ".join([*invented, appended])
    assert source_of(on_one_line, header=header) == SENDER
    assert source_of(*invented, appended, header=header) == SENDER


@given(st.text(alphabet=st.characters(max_codepoint=255)), st.booleans())
def test_what_names_no_address_has_one_limit_and_is_from_no_network(
    text: str, forwarded: bool
) -> None:
    header: ForwardedHeader = "Forwarded" if forwarded else "X-Forwarded-For"
    source = source_of(text, header=header)
    assert source == UNKNOWN_SOURCE or is_within(
        source, [parse_network("0.0.0.0/0"), parse_network("::/0")]
    )


def test_changing_ports_of_a_sender_meet_one_limit() -> None:
    addresses = {
        limited_address(resolved(("X-Forwarded-For", f"{SENDER}:{port}")))
        for port in range(1024, 1274)
    }
    assert addresses == {SENDER}
    networks = {
        limited_address(resolved(("X-Forwarded-For", f"[2001:db8:0:1::{host:x}]:{host}")))
        for host in range(1, 250)
    }
    assert networks == {"2001:db8:0:1::/64"}
    hidden = {limited_address(resolved(("X-Forwarded-For", f"_{number}"))) for number in range(250)}
    assert hidden == {UNKNOWN_SOURCE}


def test_a_header_of_thousands_of_hops_is_read_in_no_time() -> None:
    ours = ", ".join(["10.0.0.2"] * 6_000)
    assert source_of(f"{SENDER}, {ours}") == "10.0.0.2"
