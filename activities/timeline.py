"""Writing the timeline of a user's worker."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError
from temporalio import activity
from temporalio.exceptions import ApplicationError

from infra.database import timeline
from infra.database.engine import Database
from workflows import messages as m

#: SQLSTATE class of values that a column cannot hold.
_DATA_EXCEPTION = "22"


class Timeline:
    """Activity `record_timeline`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @activity.defn
    async def record_timeline(self, request: m.RecordTimeline) -> None:
        """Writes transitions; a repeat writes none twice.

        Raises `DatabaseUnavailable`; and for rows that PostgreSQL will never take (a user id that is too
        long, of a run that somebody started by hand) an error that is not tried again.
        """
        rows = [
            timeline.Row(
                number=transition.number,
                at=transition.at,
                before=str(transition.before),
                after=str(transition.after),
                reason=transition.reason,
                worker_id=transition.worker_id,
                epoch=transition.epoch,
                deadline=transition.deadline,
            )
            for transition in request.transitions
        ]
        try:
            async with self._database.session() as session:
                await timeline.record(session, user_id=request.user_id, chain=request.chain, transitions=rows)
        except DBAPIError as error:
            if str(getattr(error.orig, "sqlstate", "") or "")[:2] != _DATA_EXCEPTION:
                raise
            kind = type(error.orig).__name__
            raise ApplicationError("PostgreSQL refuses the rows", type=kind, non_retryable=True) from error
