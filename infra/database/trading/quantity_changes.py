"""Stores what quantity changes were seen to mean at a broker, by people with keys
(`berth broker check`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.models import BrokerAccount, upsert
from infra.database.trading.models import QuantityChangeConfirmation
from worker_runtime.protocol.order_terms import OrderLot
from worker_runtime.protocol.requests import ConfirmedQuantityChange, QuantityMeaning


@dataclass(frozen=True, kw_only=True)
class SeenQuantityChange:
    """A quantity change as `berth broker check` saw it."""

    broker: str
    sdk_version: str
    lot: OrderLot
    futures: bool
    simulation: bool
    meaning: QuantityMeaning
    #: The broker's view before and after, without credentials.
    evidence: Mapping[str, Any]


async def store_confirmation(
    session: AsyncSession, seen: SeenQuantityChange, *, actor: str
) -> None:
    """Stores what was seen. Of two the newer one counts."""
    key = {
        "broker": seen.broker,
        "sdk_version": seen.sdk_version,
        "lot": seen.lot.value,
        "futures": seen.futures,
        "simulation": seen.simulation,
    }
    values = {"meaning": seen.meaning.value, "evidence": dict(seen.evidence), "actor": actor}
    await session.execute(
        upsert(QuantityChangeConfirmation, key, values, at=func.clock_timestamp())
    )
    subject = f"broker:{seen.broker}"
    audit.append_entry(
        session, actor, "quantity_change.confirmed", subject, **key, meaning=seen.meaning.value
    )


async def confirmed_for(
    session: AsyncSession, user_id: str, account_id: str
) -> Sequence[ConfirmedQuantityChange]:
    """Returns what is confirmed for an account's broker in the account's own mode: what a
    simulation did says nothing of production."""
    rows = await session.scalars(
        select(QuantityChangeConfirmation)
        .join(
            BrokerAccount,
            (BrokerAccount.broker == QuantityChangeConfirmation.broker)
            & (BrokerAccount.simulation == QuantityChangeConfirmation.simulation),
        )
        .where(BrokerAccount.user_id == user_id, BrokerAccount.account_id == account_id)
        .order_by(QuantityChangeConfirmation.at.desc())
        .limit(100)
    )
    return [
        ConfirmedQuantityChange(
            sdk_version=row.sdk_version,
            lot=OrderLot(row.lot),
            futures=row.futures,
            meaning=QuantityMeaning(row.meaning),
        )
        for row in rows
    ]
