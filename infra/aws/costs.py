"""What a month on AWS costs, for 100, 1,000 and 10,000 users:
`python -m infra.aws.costs` prints the table.

Prices are list prices on demand in Tokyo, in USD, as far as known in November 2026 and without a
look-up: put in your own. Savings plans for the hosts that always run take off about a third.
"""

import math
import sys
from dataclasses import dataclass

from infra.hosts.scaling import plan_hosts
from infra.vault.secret_folders import CHECK_INTERVAL_S

HOURS_PER_MONTH, TRADING_HOURS_PER_MONTH = 730, 12 * 22
USER_COUNTS = (100, 1_000, 10_000)

# Prices of an hour.
API_HOST_USD_PER_HOUR, WORKER_HOST_USD_PER_HOUR = 0.124, 0.152
BALANCER_USD_PER_HOUR, NAT_USD_PER_HOUR, ENDPOINT_USD_PER_HOUR = 0.0243, 0.062, 0.014
#: With a standby in the second zone: PostgreSQL (m6g) and ElastiCache (m7g), by their sizes.
DATABASE_USD_PER_HOUR = {"large": 0.426, "xlarge": 0.852, "4xlarge": 3.408}
ELASTICACHE_USD_PER_HOUR = {"large": 0.312, "xlarge": 0.622, "4xlarge": 2.480}
#: One host of our own (m6i), and what its load balancer asks for each 3,000 open connections.
VALKEY_HOST_USD_PER_HOUR = {"large": 0.124, "xlarge": 0.248, "4xlarge": 0.992}
BALANCER_UNIT_USD_PER_HOUR = 0.006
# Prices of a month.
(
    DISK_USD_PER_GIB,
    SNAPSHOT_USD_PER_GIB,
    DATABASE_USD_PER_GIB,
    SECRET_USD,
    KEY_USD,
    ALARM_USD,
    METRIC_USD,
) = (
    0.096,
    0.05,
    0.276,
    0.40,
    1.0,
    0.10,
    0.30,
)
#: Of Valkey's volume, as in `stages.py`.
VALKEY_VOLUME_GIB = 50
#: How many of them `production` has; CloudWatch's own metrics cost nothing.
SECRET_COUNT, KEY_COUNT, ALARM_COUNT, METRIC_COUNT = 20, 2, 21, 7
#: Folders of keys that the tasks other than the API's follow,
#: and an API task; a call each `CHECK_INTERVAL_S` seconds.
FOLDER_COUNT, FOLDER_COUNT_PER_API_TASK, USD_PER_10_000_SECRET_CALLS = 21, 4, 0.05
# Prices of a GiB: through NAT, out to the internet, and into logs.
NAT_USD_PER_GIB, EGRESS_USD_PER_GIB, LOG_USD_PER_GIB = 0.062, 0.114, 0.76
#: Temporal Cloud: the plan, and a million actions.
TEMPORAL_PLAN_USD, TEMPORAL_USD_PER_MILLION_ACTIONS = 100.0, 50.0


@dataclass(frozen=True, kw_only=True)
class CostLoad:
    """What users do. Each figure is an assumption but for the ones with a source."""

    users: int
    #: Of the users, how many have a worker at the same time in trading hours, and at other times.
    busy: float = 0.8
    quiet: float = 0.1
    #: Requests a minute of one user to the API, in trading hours.
    requests: float = 2.0
    orders_a_day: float = 10.0
    #: Actions of Temporal for one user in a trading hour (cheap-at-rest: at most 6), and for an
    #: order that does not fill at once, with the share of those.
    actions_an_hour: float = 6.0
    actions_an_order: float = 12.0
    slow_orders: float = 0.2
    #: GiB a month of one user: quotes and fills through NAT, answers, log lines.
    nat: float = 0.5
    egress: float = 0.1
    log: float = 0.05

    @property
    def size(self) -> str:
        """Returns the size of PostgreSQL's and Valkey's instances. 100 orders a second take 2 cores
        (docs/measured.md)."""
        return "large" if self.users <= 300 else "xlarge" if self.users <= 3_000 else "4xlarge"


def own_valkey(load: CostLoad) -> float:
    """Returns USD a month of a host with its volume, hourly snapshots as large as two volumes, and
    the balancer.

    Each busy user's worker has four connections.
    """
    units = 4 * load.users * load.busy / 3_000
    hourly = (
        VALKEY_HOST_USD_PER_HOUR[load.size]
        + BALANCER_USD_PER_HOUR
        + BALANCER_UNIT_USD_PER_HOUR * units
    )
    return hourly * HOURS_PER_MONTH + VALKEY_VOLUME_GIB * (
        DISK_USD_PER_GIB + 2 * SNAPSHOT_USD_PER_GIB
    )


def costs(load: CostLoad) -> dict[str, float]:
    """Returns USD a month, by what it is for."""
    busy, quiet = (
        plan_hosts(math.ceil(load.users * share), warm=1).wanted
        for share in (load.busy, load.quiet)
    )
    api_tasks = max(2, math.ceil(load.users * load.requests / 1000))
    # Two API tasks to a host, and a host for orchestrators and job runners in each zone.
    api_hosts = math.ceil(api_tasks / 2) + 2
    orders = load.users * load.orders_a_day * 22
    actions = load.users * load.actions_an_hour * TRADING_HOURS_PER_MONTH
    actions += orders * load.slow_orders * load.actions_an_order
    disks = (api_hosts + busy) * 50
    stored = 100 + orders * 12 * 4e-6  # 4 kB an order, kept a year
    return {
        "worker hosts": WORKER_HOST_USD_PER_HOUR
        * (busy * TRADING_HOURS_PER_MONTH + quiet * (HOURS_PER_MONTH - TRADING_HOURS_PER_MONTH)),
        "API, orchestrators, jobs": API_HOST_USD_PER_HOUR * api_hosts * HOURS_PER_MONTH,
        "disks of hosts": disks * DISK_USD_PER_GIB,
        "PostgreSQL": DATABASE_USD_PER_HOUR[load.size] * HOURS_PER_MONTH
        + stored * DATABASE_USD_PER_GIB,
        "Valkey on a host of our own": own_valkey(load),
        "Temporal Cloud": TEMPORAL_PLAN_USD + actions / 1e6 * TEMPORAL_USD_PER_MILLION_ACTIONS,
        "network": (BALANCER_USD_PER_HOUR + 2 * NAT_USD_PER_HOUR + 2 * 5 * ENDPOINT_USD_PER_HOUR)
        * HOURS_PER_MONTH
        + load.users * (load.nat * NAT_USD_PER_GIB + load.egress * EGRESS_USD_PER_GIB),
        "logs, keys, secrets, alarms": load.users * load.log * LOG_USD_PER_GIB
        + SECRET_COUNT * SECRET_USD
        + (FOLDER_COUNT + FOLDER_COUNT_PER_API_TASK * api_tasks)
        * HOURS_PER_MONTH
        * 3600
        / CHECK_INTERVAL_S
        / 10_000
        * USD_PER_10_000_SECRET_CALLS
        + KEY_COUNT * KEY_USD
        + ALARM_COUNT * ALARM_USD
        + METRIC_COUNT * METRIC_USD,
    }


def table() -> str:
    """Returns the table in Markdown."""
    columns = [costs(CostLoad(users=users)) for users in USER_COUNTS]
    heads = "".join(f" {users:,} users |" for users in USER_COUNTS)
    lines = [f"| USD a month |{heads}", "|---|" + "---:|" * len(USER_COUNTS)]
    lines += [
        f"| {name} |" + "".join(f" {column[name]:,.0f} |" for column in columns)
        for name in columns[0]
    ]
    sums = [sum(column.values()) for column in columns]
    lines.append("| **all** |" + "".join(f" **{total:,.0f}** |" for total in sums))
    each = zip(sums, USER_COUNTS, strict=True)
    lines.append("| a user |" + "".join(f" {total / users:,.2f} |" for total, users in each))
    *managed, last_managed = (
        f"{ELASTICACHE_USD_PER_HOUR[CostLoad(users=users).size] * HOURS_PER_MONTH:,.0f}"
        for users in USER_COUNTS
    )
    lines += [
        "",
        f"ElastiCache with a standby costs {', '.join(managed)} and {last_managed} instead of the "
        "Valkey host's figures.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
