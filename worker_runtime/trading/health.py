"""Sends one event at each change of the whole worker's health, which the metadata shows, too.

A user has one worker and perhaps several accounts. The workflow needs the worker's health; the
event's detail names the account.
"""

from collections.abc import Callable, Collection, Sequence

from worker_runtime.process.shared_state import ERROR_CODES, NO_ERROR, HealthCondition, SharedState
from worker_runtime.protocol import errors
from worker_runtime.protocol.messages import AccountLogin, WorkerEventKind
from worker_runtime.trading.account_session import AccountSession

_EVENTS = {
    HealthCondition.WELL: WorkerEventKind.CONNECTED,
    HealthCondition.RECONNECTING: WorkerEventKind.RECONNECTING,
    HealthCondition.DEGRADED: WorkerEventKind.DEGRADED,
}

AddWorkerEvent = Callable[[WorkerEventKind, str, Sequence[AccountLogin]], None]


def logins_of(sessions: Collection[AccountSession]) -> list[AccountLogin]:
    """Returns the state of each login that was tried."""
    return [login for session in sessions if (login := session.login()) is not None]


class HealthMonitor:
    """Checks all broker sessions after a change of one, and reports the worker's health."""

    def __init__(self, shared_state: SharedState, add_event: AddWorkerEvent) -> None:
        self._shared_state = shared_state
        self._add_event = add_event
        #: The last report of each account: its id, its fault, the version that was rejected.
        self._brief: list[tuple[str, str, int]] = []
        shared_state.trouble, shared_state.condition = NO_ERROR, HealthCondition.NEW
        shared_state.accounts = shared_state.accounts_connected = 0

    def update(self, sessions: Collection[AccountSession], detail: str = "") -> None:
        """Reports the worker's health if that, or an account's login, has changed. `detail`: for
        CONNECTED.

        The worker is healthy while one account is: each of the others has a reason of its own.
        """
        self._shared_state.accounts = len(sessions)
        self._shared_state.accounts_connected = sum(
            session.broker is not None for session in sessions
        )
        logins = logins_of(sessions)
        troubled = [login for login in logins if login.code]
        missing = [session for session in sessions if session.broker is None]
        unlisted = [
            session for session in sessions if session.broker is not None and not session.listed
        ]
        away = [session for session in missing if session.away]
        waiting = [session for session in missing if session.refused is None]
        condition, code = HealthCondition.DEGRADED, ""
        if len(missing) + len(unlisted) < len(sessions):
            condition = HealthCondition.WELL
            if troubled:
                code = troubled[0].code
                detail = ", ".join(
                    f"without {login.account_id}: {login.code}" for login in troubled
                )
        elif unlisted:
            detail, code = (
                f"{unlisted[0].name}: its orders cannot be listed",
                unlisted[0].listing_error,
            )
        elif away:
            code = away[0].error.code if away[0].error else ""
            detail = f"{away[0].name}: {code}"
        elif waiting and self._condition is HealthCondition.WELL:
            condition = HealthCondition.RECONNECTING
            detail = f"{waiting[0].name}: {waiting[0].lost_because}"
        else:
            return
        self._report(condition, detail, code, logins)

    def report_lease_ending(self) -> None:
        """Reports that all broker sessions were closed because the lease is about to end."""
        self._shared_state.accounts_connected = 0
        if self._condition is not HealthCondition.NEW:
            self._report(
                HealthCondition.DEGRADED, "the lease was not renewed in time", errors.LeaseLost.code
            )

    @property
    def _condition(self) -> HealthCondition:
        return HealthCondition(self._shared_state.condition)

    def _report(
        self,
        condition: HealthCondition,
        detail: str,
        code: str,
        logins: Sequence[AccountLogin] = (),
    ) -> None:
        """Shows the condition; sends its event if it or an account's condition has changed."""
        brief = [(login.account_id, login.code, login.rejected) for login in logins] or self._brief
        same = self._condition is condition and brief == self._brief
        self._brief = brief
        self._shared_state.trouble = (
            NO_ERROR if not code else ERROR_CODES.index(code) if code in ERROR_CODES else 0
        )
        self._shared_state.condition = condition
        if not same:
            self._add_event(_EVENTS[condition], detail, logins)
