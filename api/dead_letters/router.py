"""Routes of dead letters: one list of what failed for good, for operators."""

from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Query

from api.container import Call
from api.dead_letters.schemas import DeadLetterPage, DeadLetterView
from api.dead_letters.service import dismiss_letter, redrive_letter
from api.http import problems
from api.http.errors import Forbidden, LetterRefused, TemporalUnavailable, ValkeyUnavailable
from api.http.fields import ID_PATTERN, OfUser
from api.orders.schemas import PageCursor, PageLimit, cursor_of, position_of
from api.workers.schemas import ReasonBody
from infra.database import dead_letters
from infra.database.dead_letters import (
    DeadLetterNotFound,
)
from infra.database.engine import DatabaseUnavailable

router = APIRouter(prefix="/dead-letters", tags=["dead letters"])

Kind = Annotated[
    str | None, Query(pattern=ID_PATTERN, max_length=32, description="Only of this kind.")
]


@router.get("", summary="List dead letters")
async def list_dead_letters(
    call: Call,
    kind: Kind = None,
    user_id: OfUser = None,
    cursor: PageCursor = None,
    limit: PageLimit = 100,
) -> DeadLetterPage:
    """Shows workflow runs, jobs, alerts and messages that failed for good, and orders that wait for
    an operator, the newest first. They block nobody, but something was lost. For operators."""
    behind = position_of(cursor) if cursor else None
    rows = await call.database.fetch(
        dead_letters.list_letters, kind=kind, user_id=user_id, after=behind, limit=limit + 1
    )
    end = cursor_of((rows[limit - 1].last_at, rows[limit - 1].id)) if len(rows) > limit else None
    return DeadLetterPage.model_validate({"letters": rows[:limit], "next_cursor": end})


@router.get(
    "/{letter_id}",
    summary="Get a dead letter",
    responses=problems.responses(DeadLetterNotFound),
)
async def get_dead_letter(letter_id: UUID, call: Call) -> DeadLetterView:
    """Finds closed ones, too. For operators."""
    return DeadLetterView.model_validate(
        await call.database.fetch(dead_letters.get_letter, letter_id)
    )


@router.post(
    "/{letter_id}/{act}",
    summary="Redrive or dismiss a dead letter",
    responses=problems.responses(
        Forbidden,
        DeadLetterNotFound,
        LetterRefused,
        TemporalUnavailable,
        ValkeyUnavailable,
        DatabaseUnavailable,
    ),
)
async def close_dead_letter(
    letter_id: UUID, act: Literal["redrive", "dismiss"], body: ReasonBody, call: Call
) -> DeadLetterView:
    """`redrive` tries again: it rechecks an order, requeues a job or an alert, starts a workflow
    with the same input, or hands a message to its readers. The letter is open again if that fails.
    `dismiss` only closes the letter, and removes a failed job from its queue. For operators."""
    letter = await call.database.fetch(dead_letters.get_letter, letter_id)
    if letter.closed_at is not None:
        raise LetterRefused("somebody has redriven or dismissed it")
    about = {"kind": letter.kind, "of": letter.subject, "reason": body.reason}
    await call.audit(f"dead_letter.{act}_requested", f"dead_letter:{letter_id}", **about)
    await (redrive_letter if act == "redrive" else dismiss_letter)(call, letter)
    # It opens again if the same fails again.
    await call.database.write(dead_letters.close_letter, letter)
    return await get_dead_letter(letter_id, call)
