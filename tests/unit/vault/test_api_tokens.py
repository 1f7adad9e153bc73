"""Tokens of API keys and webhooks: made-up ones are distinguished from genuine ones, also over a
rotation."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.vault.api_tokens import MAX_TOKEN_LENGTH, ApiTokens
from infra.vault.secret_versions import add_version, create_versions, drop_before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_versions(tmp_path / "api.key")
    return tmp_path / "api.key"


def test_every_token_is_another_and_genuine(path: Path) -> None:
    tokens = ApiTokens(path)
    made = [tokens.make() for _ in range(100)] + [tokens.make("") for _ in range(100)]
    assert len(set(made)) == 200
    assert all(tokens.is_genuine(token) and len(token) <= MAX_TOKEN_LENGTH for token in made)
    assert made[0].startswith("berth_")


def test_no_changed_character_goes_unseen(path: Path) -> None:
    tokens = ApiTokens(path)
    token = tokens.make()
    for place, letter in enumerate(token):
        other = "0" if letter != "0" else "1"
        assert not tokens.is_genuine(token[:place] + other + token[place + 1 :]), place
    assert not tokens.is_genuine(token + "0")


def test_a_token_of_another_secret_is_not_genuine(path: Path, tmp_path: Path) -> None:
    create_versions(tmp_path / "other.key")
    assert not ApiTokens(path).is_genuine(ApiTokens(tmp_path / "other.key").make())


def test_a_token_counts_until_its_version_is_retired(path: Path) -> None:
    late, maker = ApiTokens(path), ApiTokens(path)
    before = maker.make()
    add_version(path, keep=2)
    after = ApiTokens(path).make()
    assert late.is_genuine(after)  # although it looked at the file a moment ago
    assert late.is_genuine(before)
    drop_before(path, 2)
    present = ApiTokens(path)
    assert present.is_genuine(after)
    assert not present.is_genuine(before)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> ApiTokens:
    path = tmp_path_factory.mktemp("keys") / "api.key"
    create_versions(path)
    return ApiTokens(path)


@given(st.text() | st.from_regex(r"berth_[\w-]{43}\.\d{1,6}\.[0-9a-f]{32}", fullmatch=True))
def test_nothing_made_up_is_genuine_or_raises(tokens: ApiTokens, text: str) -> None:
    assert not tokens.is_genuine(text)
