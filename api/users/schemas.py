"""Bodies and views of users, credentials, account limits and statement addresses.

Credentials come in, are encrypted at once, and never go out.
"""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, Base64Bytes, Field, SecretStr, field_validator, model_validator

from api.http.fields import Body, Price, UserId, View
from api.http.rights import SCOPES_OF, Role, Scope
from api.jobs.schemas import MailAddress, WebUrl
from api.orders.schemas import MAX_QUANTITY
from infra.database.accounts import LoginState, login_of
from infra.database.models import StoredCredentials
from worker_runtime.protocol.broker_record import BrokerRecord
from worker_runtime.protocol.installed_brokers import installed_brokers


class UserRequest(Body):
    """A user to be. Without a `user_id` one is made up."""

    user_id: UserId | None = None
    scopes: list[Scope] | None = Field(
        default=None,
        min_length=1,
        description="What the user's first key may do; null: all that a user may do. None that "
        "the key of this call does not have.",
    )

    @field_validator("scopes")
    @classmethod
    def _are_of_users(cls, scopes: list[Scope] | None) -> list[Scope] | None:
        if surplus := sorted(set(scopes or ()) - SCOPES_OF[Role.USER]):
            raise ValueError(f"users have no scope {', '.join(surplus)}")
        return scopes


class UserWithKeyView(View):
    """A new user with a key of the role `user`. The key is shown here once, and kept only as a
    hash."""

    user_id: str
    created_at: datetime
    api_key: str = Field(repr=False)
    expires_at: datetime | None = Field(default=None, description="When the key ends.")


class UserView(View):
    """A user. A disabled one places no orders, and its keys are refused."""

    user_id: str = Field(validation_alias=AliasChoices("user_id", "id"))
    created_at: datetime
    disabled_at: datetime | None


class UserPage(View):
    """Users by id."""

    users: list[UserView]
    next_cursor: str | None = Field(description="`cursor` of the next page; null: there is none.")


class AccountView(View):
    """A broker account, without its credentials."""

    account_id: str
    broker: str
    broker_type: str
    simulation: bool
    broker_account: str = Field(description="Its id at the broker.")
    created_at: datetime
    version: int = Field(description="Of its credentials; grows with every change and retry.")
    updated_at: datetime = Field(description="When they were stored.")
    login: LoginState = Field(description="`rejected`: not tried again before a change or a retry.")
    login_code: str = Field(description="What is wrong; empty if nothing is.")
    login_detail: str
    certificate_expires_at: datetime | None = Field(
        description="When the certificate that signs orders expires; null: there is none, or "
        "it is not known."
    )

    @classmethod
    def of(cls, stored: StoredCredentials, epoch: int) -> Self:
        """Makes the view of stored credentials; `epoch` is that of the user's worker, or 0."""
        number = {"broker_account": stored.account.number or stored.account_id}
        shown = vars(stored.account) | vars(stored) | number | login_of(stored, epoch)
        return cls.model_validate(shown)


class UserDetailView(UserView):
    """A user with its accounts, by id."""

    accounts: list[AccountView]


def _list_brokers(schema: dict[str, Any]) -> None:
    """Names the installed brokers in the OpenAPI document."""
    schema["enum"] = sorted(installed_brokers())


#: Bytes of a certificate in PKCS#12; real ones have about 5,000.
MAX_CERTIFICATE_BYTES = 32 * 1024

Secret = Annotated[SecretStr, Field(max_length=512)]


class CredentialsRequest(Body):
    """The data that the broker's login needs. Berth stores it encrypted; the API can encrypt but
    not decrypt."""

    broker: str = Field(
        max_length=16, json_schema_extra=_list_brokers, description="One of the installed brokers."
    )
    broker_type: str = Field(
        default="",
        pattern=r"^[a-z0-9_]*$",
        max_length=16,
        description="The market that the account trades. Without it: the broker's first one.",
    )
    simulation: bool = True
    broker_account: UserId | None = Field(
        default=None,
        description="The broker's own id of the account, if it is not `account_id`. Kept from "
        "then on.",
    )
    api_key: Secret = SecretStr("")
    secret_key: Secret = SecretStr("")
    person_id: SecretStr = Field(default=SecretStr(""), max_length=32)
    ca_certificate: Base64Bytes = Field(
        default=b"", repr=False, max_length=MAX_CERTIFICATE_BYTES, description="PKCS#12, Base64."
    )
    ca_password: SecretStr = Field(default=SecretStr(""), max_length=256)

    @property
    def market(self) -> str:
        """The account's `broker_type`."""
        return self.broker_type or next(iter(installed_brokers()[self.broker].record.markets))

    @model_validator(mode="after")
    def _fits_the_brokers_record(self) -> Self:
        """Requires an installed broker, a market that it has, and the credentials that its record
        names."""
        plugin = installed_brokers().get(self.broker)
        if plugin is None:
            raise ValueError(
                f"there is no broker {self.broker!r}; installed are "
                f"{', '.join(sorted(installed_brokers()))}"
            )
        record = plugin.record
        if self.market not in record.markets:
            raise ValueError(
                f"{record.title} has no accounts of the type {self.broker_type!r}; it has "
                f"{', '.join(record.markets)}"
            )
        if self.simulation and not record.has_simulation:
            raise ValueError(f"{record.title} has no simulation: send `simulation` as false")
        check_lengths(record, self)
        for name in record.needed_credentials(simulation=self.simulation):
            value = getattr(self, name)
            if not (value.get_secret_value() if isinstance(value, SecretStr) else value):
                raise ValueError(f"{record.title} needs `{name}`: {record.credentials[name].title}")
        return self


def check_lengths(record: BrokerRecord, credentials: CredentialsRequest) -> None:
    """Raises `ValueError` for a field that is longer than the broker's record says."""
    for name, field in record.credentials.items():
        value = getattr(credentials, name)
        length = len(value.get_secret_value() if isinstance(value, SecretStr) else value)
        if length > field.max_length:
            raise ValueError(
                f"`{name}` has {length} characters; {record.title} has at most"
                f" {field.max_length} ({field.title})"
            )


LoginTrial = Literal["verified", "rejected", "not_tried"]


class CredentialsView(View):
    """Describes stored credentials: all but the credentials themselves."""

    user_id: str
    account_id: str
    broker: str
    broker_type: str
    simulation: bool
    version: int = Field(description="Grows with every change.")
    login: LoginTrial = Field(description="What the broker says to them now; stored in any case.")
    login_detail: str = Field(description="Why they were rejected or not tried.")
    reload_signalled: bool = Field(
        description="The user's running worker was told to load them now."
    )
    certificate_expires_at: datetime | None = Field(
        default=None,
        description="When the certificate expires; null: there is none, or it is not known.",
    )


#: The largest number that the columns can hold.
_MAX_INTEGER = 2**31 - 1


class AccountLimitsRequest(Body):
    """Says what an account may do, where it differs from the settings; null: as they say."""

    max_quantity: int | None = Field(
        default=None, strict=True, ge=0, le=MAX_QUANTITY, description="Lots of one order."
    )
    max_notional: Decimal | None = Field(
        default=None,
        ge=0,
        max_digits=14,
        decimal_places=2,
        description="Value of one order, in the account's currency.",
    )
    max_daily_orders: int | None = Field(default=None, strict=True, ge=0, le=_MAX_INTEGER)
    duplicate_window_s: int | None = Field(
        default=None,
        strict=True,
        ge=0,
        le=86_400,
        description="Seconds in which a second order for the same is a mistake; 0: never.",
    )
    #: A share of the broker's reference price.
    price_band: Decimal | None = Field(default=None, gt=0, le=1, max_digits=4, decimal_places=4)


class AccountLimitsView(View):
    """An account's own limits; null: as the settings say."""

    max_quantity: int | None
    max_notional: Price | None
    max_daily_orders: int | None
    duplicate_window_s: int | None
    price_band: Price | None


class StatementAddressesRequest(Body):
    """Both addresses; what is null or left out is none."""

    email: MailAddress | None = None
    webhook_url: WebUrl | None = Field(
        default=None, description="Gets the statement as JSON, signed with the user's key."
    )


class StatementAddressesView(View):
    """Where the daily statements go; null: not there."""

    email: str | None
    webhook_url: str | None
