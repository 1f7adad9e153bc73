"""Bodies and views of users, credentials, account limits and statement addresses.

Credentials come in, are encrypted at once, and never go out.
"""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Base64Bytes, Field, SecretStr

from api.http.fields import Body, Price, UserId, View, examples
from api.jobs.schemas import MailAddress, WebUrl
from api.orders.schemas import MAX_QUANTITY


class UserRequest(Body):
    """A user to be. Without a `user_id` one is made up."""

    model_config = examples({"user_id": "alice"}, {})

    user_id: UserId | None = None


class UserWithKeyView(View):
    """A new user with a key of the role `user`. The key is shown here once, and kept only as a hash."""

    model_config = examples(
        {
            "user_id": "alice",
            "created_at": "2026-11-21T01:00:00Z",
            "api_key": "bk_shown-here-once-and-never-again",
        }
    )

    user_id: str
    created_at: datetime
    api_key: Annotated[str, Field(repr=False)]


class BrokerName(StrEnum):
    PAPER = "paper"
    SHIOAJI = "shioaji"


#: Bytes of a certificate in PKCS#12; Shioaji's have about 5,000.
MAX_CERTIFICATE = 32 * 1024

Secret = Annotated[SecretStr, Field(min_length=1, max_length=512)]


class CredentialsRequest(Body):
    """What the broker's login needs. Stored encrypted; the API can encrypt but not decrypt."""

    model_config = examples(
        {
            "broker": "paper",
            "broker_type": "stock",
            "simulation": True,
            "api_key": "your key at the broker",
            "secret_key": "its secret",
        }
    )

    broker: BrokerName
    broker_type: Annotated[str, Field(pattern=r"^[a-z_]+$", max_length=16)] = "stock"
    simulation: bool = True
    api_key: Secret
    secret_key: Secret
    person_id: Annotated[SecretStr, Field(max_length=32)] = SecretStr("")
    ca_certificate: Annotated[
        Base64Bytes,
        Field(repr=False, max_length=MAX_CERTIFICATE, description="PKCS#12, Base64."),
    ] = b""
    ca_password: Annotated[SecretStr, Field(max_length=256)] = SecretStr("")


class CredentialsView(View):
    """What is told about stored credentials: all but the credentials."""

    model_config = examples(
        {
            "user_id": "alice",
            "account_id": "9A95-0123456",
            "broker": "paper",
            "broker_type": "stock",
            "simulation": True,
            "version": 1,
            "reload_signalled": False,
        }
    )

    user_id: str
    account_id: str
    broker: str
    broker_type: str
    simulation: bool
    version: Annotated[int, Field(description="Grows with every change.")]
    reload_signalled: Annotated[
        bool, Field(description="The user's running worker was told to load them now.")
    ]


_LIMITS_EXAMPLE: dict[str, Any] = {
    "max_quantity": 10,
    "max_notional": "5000000",
    "max_daily_orders": 200,
    "duplicate_window_s": 5,
}
#: What the columns can hold.
_MOST = 2**31 - 1


class AccountLimitsRequest(Body):
    """What one account may do, where it differs from the settings; null: as they say."""

    model_config = examples(_LIMITS_EXAMPLE)

    max_quantity: Annotated[
        int | None, Field(strict=True, ge=0, le=MAX_QUANTITY, description="Lots of one order.")
    ] = None
    max_notional: Annotated[
        Decimal | None,
        Field(ge=0, max_digits=14, decimal_places=2, allow_inf_nan=False, description="TWD of one order."),
    ] = None
    max_daily_orders: Annotated[int | None, Field(strict=True, ge=0, le=_MOST)] = None
    duplicate_window_s: Annotated[
        int | None,
        Field(
            strict=True,
            ge=0,
            le=86_400,
            description="Seconds in which a second order for the same is a mistake; 0: never.",
        ),
    ] = None


class AccountLimitsView(View):
    """An account's own limits; null: as the settings say."""

    model_config = examples(_LIMITS_EXAMPLE)

    max_quantity: int | None
    max_notional: Price | None
    max_daily_orders: int | None
    duplicate_window_s: int | None


_ADDRESSES_EXAMPLE: dict[str, Any] = {"email": "alice@example.com", "webhook_url": None}


class StatementAddressesRequest(Body):
    """Both addresses; what is null or left out is none."""

    model_config = examples(_ADDRESSES_EXAMPLE)

    email: MailAddress | None = None
    webhook_url: Annotated[
        WebUrl | None,
        Field(description="Gets the statement as JSON, signed with the user's key."),
    ] = None


class StatementAddressesView(View):
    """Where the daily statements go; null: not there."""

    model_config = examples(_ADDRESSES_EXAMPLE)

    email: str | None
    webhook_url: str | None
