"""Switches in and out: who may trade."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from api.http.fields import AccountId, Body, UserId, View, examples
from worker_runtime.protocol.requests import SwitchState

_SET: dict[str, Any] = {
    "scope": "account",
    "user_id": "alice",
    "account_id": "9A95-0123456",
    "state": "halted",
    "reason": "a stray strategy",
}
_EXAMPLE: dict[str, Any] = {
    **_SET,
    "held_by": "operator",
    "actor": "key:5f0c2b1e-6c1d-4a53-9a57-0d7f3c1b2a11",
    "at": "2026-11-21T01:00:00.000000Z",
    "version": 17,
    "in_force": True,
}


class SwitchScope(StrEnum):
    """Whom a switch is for."""

    ALL = "all"
    USER = "user"
    ACCOUNT = "account"


class SwitchHolder(StrEnum):
    """Whose switch it is. Each opens only his own, and the strictest of all counts."""

    OPERATOR = "operator"
    USER = "user"


class SwitchRequest(Body):
    """What to switch, to what, and why."""

    model_config = examples(_SET)

    scope: SwitchScope
    user_id: UserId | None = None
    account_id: AccountId | None = None
    state: SwitchState
    reason: Annotated[
        str,
        Field(min_length=1, max_length=500, pattern=r"\S", description="Why; it stands in the audit trail."),
    ]
    held_by: Annotated[
        SwitchHolder | None,
        Field(description="For operators: `user` sets the user's own switch, on the user's request."),
    ] = None

    @model_validator(mode="after")
    def _names_its_scope(self) -> Self:
        if (self.account_id is not None) != (self.scope is SwitchScope.ACCOUNT):
            raise ValueError("an account id comes with the scope `account`, and only with it")
        if self.scope is SwitchScope.ALL and (self.user_id is not None or self.held_by is SwitchHolder.USER):
            raise ValueError("the scope `all` names no user")
        return self


class SwitchView(View):
    """One switch, as somebody set it last."""

    model_config = examples(_EXAMPLE)

    scope: SwitchScope
    user_id: str | None
    account_id: str | None
    held_by: SwitchHolder
    state: SwitchState
    actor: str
    reason: str
    at: datetime
    version: Annotated[int, Field(description="Grows with every change of any switch.")]


class SwitchSetView(SwitchView):
    """A switch that was set now."""

    in_force: Annotated[
        bool,
        Field(
            description="All running workers concerned have it: it holds for orders that are queued already."
            " False: Valkey did not answer. It gets the switch within seconds of its return; until then"
            " no order is taken."
        ),
    ]


class EffectiveSwitchView(View):
    """What counts for a user: the strictest of everything set."""

    version: int
    all_accounts: SwitchState
    accounts: Annotated[
        dict[str, SwitchState], Field(description="Accounts with a state of their own that is not open.")
    ]


class SwitchList(View):
    """All switches that were ever set, the newest change first."""

    model_config = examples(
        {
            "switches": [{name: value for name, value in _EXAMPLE.items() if name != "in_force"}],
            "effective": {
                "version": 17,
                "all_accounts": "open",
                "accounts": {"9A95-0123456": "halted"},
            },
        }
    )

    switches: list[SwitchView]
    effective: Annotated[
        EffectiveSwitchView | None, Field(description="With a user: what counts for him. Else nothing.")
    ] = None
