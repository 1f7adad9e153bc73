"""Tokens that callers of the API carry: API keys,
and the part of a webhook's address that nobody guesses.

Each ends in the version of the API secret and a MAC under it, as `berth_<random>.<version>.<mac>`.
So a made-up one is refused without a query; whether a genuine one counts, PostgreSQL says. The
secret's file has the present version and, after a rotation, the one before; tokens under an older
one are refused.
"""

import secrets
from datetime import UTC, datetime
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path

from infra.vault.secret_versions import SecretVersion, SecretVersionFile

#: Random bytes of a token.
_RANDOM_BYTES = 32
#: Longest token that is looked at, in characters; ours have about 85.
MAX_TOKEN_LENGTH = 128
#: The prefix of an API key, so that one in a log or a repository is recognised.
API_KEY_PREFIX = "berth_"


class ApiTokens:
    """Makes and checks tokens, by a file that is read again when it was replaced.

    A check takes 3 µs. Safe in any thread.
    """

    def __init__(self, path: Path) -> None:
        """Raises `KeyFileMissing`, `KeyFileExposed` or `KeyFileCorrupt`."""
        self._file = SecretVersionFile(path)

    def make(self, prefix: str = API_KEY_PREFIX) -> str:
        """Makes a new token, under the present version."""
        present = self._file.present()[0]
        signed = f"{prefix}{secrets.token_urlsafe(_RANDOM_BYTES)}.{present.version}"
        return f"{signed}.{_mac(present, signed)}"

    @property
    def valid_since(self) -> datetime:
        """When the oldest version that is held was made: tokens made before are refused."""
        return datetime.fromtimestamp(self._file.present()[-1].made_at, UTC)

    def is_genuine(self, token: str) -> bool:
        """Returns True if it was made under a version that is held."""
        signed, _, mac = token.rpartition(".")
        version = signed.rpartition(".")[2]
        if len(token) > MAX_TOKEN_LENGTH or not token.isascii() or not version.isdecimal():
            return False
        held = self._file.present()
        # Made by another process that has read the file before us.
        if int(version) > held[0].version:
            held = self._file.present(now=True)
        return any(
            str(secret.version) == version and compare_digest(_mac(secret, signed), mac)
            for secret in held
        )


def _mac(secret: SecretVersion, signed: str) -> str:
    data = signed.encode("ascii")
    return blake2b(data, key=secret.secret, digest_size=16, person=b"berth api key 1").hexdigest()
