"""Names under which workflows, task queues and search attributes are known to Temporal."""

from __future__ import annotations

USER_WORKER = "UserWorkerWorkflow"
WORKER_POOL = "WorkerPoolWorkflow"

#: Workflows and light activities.
LIFECYCLE_QUEUE = "berth-lifecycle"
#: Launches, rate limited.
LAUNCH_QUEUE = "berth-launch"
ORDERS_QUEUE = "berth-orders"
BULK_QUEUE = "berth-bulk"

#: Search attributes (all of type Keyword), registered before the first workflow starts.
SA_USER = "UserId"
SA_STATE = "State"
SA_WORKER = "WorkerId"
SA_POOL = "Pool"
SEARCH_ATTRIBUTES = (SA_USER, SA_STATE, SA_WORKER, SA_POOL)


def user_worker_id(user_id: str) -> str:
    return f"user-worker-{user_id}"


def worker_pool_id(pool: str) -> str:
    return f"worker-pool-{pool}"
