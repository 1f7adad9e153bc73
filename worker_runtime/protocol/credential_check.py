"""A line of JSON by which a broker's server checks credentials without a login.

Only a broker whose record says so is asked (`credentials.check = "line"`): the check opens no
session there and counts against no limit. One line over TCP, answered by one line.
"""

import msgspec


class CredentialCheck(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="login"):
    """Asks whether an account has these keys. `account` is the broker's own id of it."""

    id: int = 1
    account: str
    api_key: str
    secret_key: str
    person_id: str = ""
    check_only: bool = True


class CheckedCredentials(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="reply"):
    """The answer. `error` is one of the codes of `errors.py`; None: the keys are right."""

    error: str | None = None
    detail: str = ""
