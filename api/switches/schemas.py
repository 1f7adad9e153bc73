"""The fields of kill switches in requests and answers."""

from datetime import datetime
from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from api.http.fields import NOT_BLANK, AccountId, Body, UserId, View
from worker_runtime.protocol.requests import SwitchState


class SwitchScope(StrEnum):
    """Whom a switch is for."""

    ALL = "all"
    USER = "user"
    ACCOUNT = "account"


class SwitchHolder(StrEnum):
    """Whose switch it is. Each person opens only their own, and the strictest of all counts."""

    OPERATOR = "operator"
    USER = "user"


class SwitchRequest(Body):
    """Says what to switch, to what, and why."""

    scope: SwitchScope
    user_id: UserId | None = None
    account_id: AccountId | None = None
    state: SwitchState
    reason: str = Field(
        min_length=1,
        max_length=500,
        pattern=NOT_BLANK,
        description="The reason; kept in the audit trail.",
    )
    held_by: SwitchHolder | None = Field(
        default=None,
        description="For operators: `user` sets the user's own switch, on the user's request.",
    )

    @model_validator(mode="after")
    def _names_its_scope(self) -> Self:
        if (self.account_id is not None) != (self.scope is SwitchScope.ACCOUNT):
            raise ValueError("an account id comes with the scope `account`, and only with it")
        if self.scope is SwitchScope.ALL and (
            self.user_id is not None or self.held_by is SwitchHolder.USER
        ):
            raise ValueError("the scope `all` names no user")
        return self


class SwitchView(View):
    """Describes a switch, as somebody set it last."""

    scope: SwitchScope
    user_id: str | None
    account_id: str | None
    held_by: SwitchHolder
    state: SwitchState
    actor: str
    reason: str
    at: datetime
    version: int = Field(description="Grows with every change of any switch.")


class SwitchSetView(SwitchView):
    """A switch that was set now."""

    in_force: bool = Field(
        description="All running workers concerned have it: it holds for orders that are queued "
        "already. False: Valkey did not answer. It gets the switch within seconds of its return; "
        "until then no order is taken."
    )
    also: str | None = Field(
        default=None,
        description="The strictest other switch that holds for this user or account, in words.",
    )


class EffectiveSwitchView(View):
    """Says which states apply to a user: the strictest of everything set."""

    version: int
    all_accounts: SwitchState
    accounts: dict[str, SwitchState] = Field(
        description="Accounts with a state of their own that is not open."
    )


class SwitchList(View):
    """A page of switches, the newest change first."""

    switches: list[SwitchView]
    next_cursor: int | None = None
    effective: EffectiveSwitchView | None = Field(
        default=None, description="The switches that apply to `user`; null if no user is given."
    )
