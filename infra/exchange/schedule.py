"""Random faults that can be repeated: a seed and a rate for each fault point.

Whether a fault strikes depends on the seed, the account, the fault point and how often this account has come
to this point since the plan was set; not on time, nor on what other accounts do. A restart of the exchange
begins another, equally repeatable stretch of the same plan.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from infra.exchange.faults import FaultPoint
from infra.exchange.ledger import Ledger

#: The scope of the plan for all accounts that have none of their own.
EVERYONE = ""
_SETTING = "fault plan "
_SPACE = 2**64


class FaultPlan(BaseModel):
    """`rates`: fault point → share of the calls at which it strikes, 0 to 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 1
    rates: dict[FaultPoint, Annotated[float, Field(ge=0.0, le=1.0)]] = Field(default_factory=dict)


class _Kept(BaseModel):
    plan: FaultPlan
    #: Which start of the exchange it was set in.
    start: int


def draw(*of: object) -> float:
    """A number from 0 up to 1 that looks random and is always the same for the same arguments."""
    text = "\x1f".join(map(str, of)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest()) / _SPACE


class FaultSchedule:
    """The plans in force; they outlive a restart."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        kept = ledger.settings_like(_SETTING)
        self._plans = {name: _Kept.model_validate_json(value) for name, value in kept.items()}
        self._visits: dict[tuple[str, FaultPoint], int] = {}
        #: Whether any plan can strike at all.
        self.active = any(kept.plan.rates for kept in self._plans.values())

    def set(self, scope: str, plan: FaultPlan) -> None:
        """Sets the plan of one account, or of `EVERYONE`; its counts begin at the beginning."""
        kept = _Kept(plan=plan, start=self._ledger.start)
        self._ledger.save_setting(_SETTING + scope, kept.model_dump_json())
        self._plans[scope] = kept
        self.active = any(kept.plan.rates for kept in self._plans.values())
        for key in [key for key in self._visits if scope in (EVERYONE, key[0])]:
            del self._visits[key]

    def get(self, scope: str) -> FaultPlan:
        kept = self._plans.get(scope)
        return kept.plan if kept else FaultPlan()

    def strikes(self, account: str, point: FaultPoint) -> bool:
        """Whether the plan lets a fault strike at this visit of the account to this point."""
        kept = self._plans.get(account) or self._plans.get(EVERYONE)
        if kept is None or not (rate := kept.plan.rates.get(point, 0.0)):
            return False
        visit = self._visits.get((account, point), 0)
        self._visits[account, point] = visit + 1
        stretch = self._ledger.start - kept.start
        return draw(kept.plan.seed, stretch, account, point.value, visit) < rate
