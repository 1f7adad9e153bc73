"""Runs a pass of maintenance: scans all workers, then starts a child for each hundred anomalies.

A Schedule starts it every minute. The rules are in `activities/maintenance/anomalies.py`: an
anomaly counts when two passes in quiet times have found it, and the clean-up checks it once more.
"""

import asyncio
from collections import Counter

from temporalio import workflow
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from workflows import names
    from workflows.maintenance.messages import (
        Batch,
        Cleaned,
        FinishPass,
        Maintained,
        MaintenanceInput,
    )

from workflows import calls


@workflow.defn(name=names.MAINTENANCE)
class MaintenanceWorkflow:
    @workflow.run
    async def run(self, given: MaintenanceInput) -> Maintained:
        scanned = await calls.scan_fleet(given)
        if not scanned.number:
            return Maintained(scanned=scanned, outcomes={})
        abreast = asyncio.Semaphore(given.abreast)

        async def clean(first: int) -> dict[str, int]:
            count = min(given.batch, scanned.confirmed - first)
            batch = Batch(number=scanned.number, first=first, count=count)
            async with abreast:
                try:
                    cleaned = await workflow.execute_child_workflow(
                        MaintenanceBatchWorkflow.run,
                        batch,
                        id=f"{workflow.info().workflow_id}-{first}",
                        static_summary=f"clean up {count} anomalies",
                    )
                except FailureError as error:  # the next pass finds them again
                    workflow.logger.warning("anomalies_left", extra={"reason": calls.cause(error)})
                    return {"failed": count}
            return cleaned.outcomes

        firsts = range(0, scanned.confirmed, given.batch)
        total: Counter[str] = Counter()
        for outcomes in await asyncio.gather(*(clean(first) for first in firsts)):
            total.update(outcomes)
        await calls.finish_pass(FinishPass(number=scanned.number, outcomes=dict(total)))
        return Maintained(scanned=scanned, outcomes=dict(total))


@workflow.defn(name=names.MAINTENANCE_BATCH)
class MaintenanceBatchWorkflow:
    @workflow.run
    async def run(self, batch: Batch) -> Cleaned:
        return await calls.clean_up(batch)
