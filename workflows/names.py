"""Names under which workflows, task queues and search attributes are known to Temporal."""

from temporalio.common import SearchAttributeKey

USER_WORKER = "UserWorkerWorkflow"
WORKER_POOL = "WorkerPoolWorkflow"
ORDER = "OrderWorkflow"
MAINTENANCE = "MaintenanceWorkflow"
MAINTENANCE_BATCH = "MaintenanceBatchWorkflow"
MORNING = "MorningWorkflow"
ROLLOUT = "RolloutWorkflow"
STATEMENTS = "StatementsWorkflow"
DAILY_REPORT = "DailyReportWorkflow"
INSTRUMENTS = "InstrumentsWorkflow"
INSTRUMENT_LOAD = "InstrumentLoadWorkflow"

#: Schedules. What one starts has the same id, with the time behind it.
MAINTENANCE_SCHEDULE = "maintenance"
MORNING_SCHEDULE = "morning"
EVENING_SCHEDULE = "evening"
STATEMENTS_SCHEDULE = "statements"
REPORT_SCHEDULE = "daily-report"
INSTRUMENTS_SCHEDULE = "instruments"

#: Workflows and light activities.
LIFECYCLE_QUEUE = "berth-lifecycle"
#: Launches, rate limited.
LAUNCH_QUEUE = "berth-launch"
ORDERS_QUEUE = "berth-orders"
BULK_QUEUE = "berth-bulk"

#: Search attributes (all of type Keyword), registered before the first workflow starts.
SEARCH_ATTRIBUTES = ("UserId", "State", "WorkerId", "Pool")
SA_USER, SA_STATE, SA_WORKER, SA_POOL = (
    SearchAttributeKey.for_keyword(name) for name in SEARCH_ATTRIBUTES
)


def user_worker_id(user_id: str) -> str:
    return f"user-worker-{user_id}"


def order_id(order: str) -> str:
    return f"order-{order}"


def worker_pool_id(pool: str) -> str:
    return f"worker-pool-{pool}"


def morning_id(day: str, evening: bool = False) -> str:
    """Returns the id of the morning workflow of a day, or of its evening."""
    return f"{'evening' if evening else 'morning'}-{day}"


def statements_id(day: str) -> str:
    """Returns the id of the statements workflow of a day."""
    return f"statements-{day}"


def instrument_load_id(broker: str, day: str, market: str = "") -> str:
    """Returns the id of the instrument load of a broker and a trading day, through the account of a
    market."""
    return f"instruments-{broker}-{day}" + (f"-{market}" if market else "")


def rollout_id(pool: str) -> str:
    """Returns the id of a pool's rollout: a pool has at most one at a time."""
    return f"rollout-{pool}"
