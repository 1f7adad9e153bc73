"""The settings of all servers, read once from the environment (prefix `BERTH_`). Durations are seconds.

`.env.example` lists every variable. A secret has no default: keys come from files. In a container a file
`/run/secrets/berth_…` replaces the variable of that name, so that a URL with a password need not be in the
environment.
"""

from __future__ import annotations

from datetime import time
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from worker_runtime.protocol.launch import Allowance, BrokerLimits

#: Where Docker and ECS mount secrets, one file each.
_SECRETS = Path("/run/secrets")


class Settings(BaseSettings):
    """Shared by API, orchestrator, node, exchange and CLI; each uses its part."""

    model_config = SettingsConfigDict(
        env_prefix="BERTH_", extra="ignore", frozen=True, secrets_dir=_SECRETS if _SECRETS.is_dir() else None
    )

    # Where things are
    data_dir: Path = Path(".berth")
    valkey_url: str = "redis://127.0.0.1:6379/0"
    database_url: str = "postgresql+asyncpg://berth@127.0.0.1:5432/berth"
    temporal_address: str = "127.0.0.1:7233"
    temporal_namespace: str = "default"
    node_socket: Path = Path(".berth/node.sock")
    #: `host:port` of the paper exchange's sessions, and its admin URL.
    exchange_address: str = "127.0.0.1:7500"
    exchange_admin_url: str = "http://127.0.0.1:7501"

    # Paper exchange: limits of one person, who is banned beyond them (the defaults are the real broker's)
    exchange_connections: int = Field(default=5, ge=0)
    exchange_logins_per_day: int = Field(default=1000, ge=0)
    #: Place, replace and cancel together.
    exchange_orders_per_10s: int = Field(default=250, ge=0)
    exchange_queries_per_5s: int = Field(default=25, ge=0)
    #: Time of day in Taipei at which its lists of orders start empty; the real broker's do at midnight.
    exchange_day_begins: time = time()

    # Keys (files with mode 0600; made by `berth keys init`)
    #: Private half of the master key; only the orchestrator reads it.
    master_key_file: Path = Path(".berth/keys/master.key")
    #: Public half of the master key, with which the API encrypts.
    master_public_file: Path = Path(".berth/keys/master.pub")
    #: Private halves of earlier master keys, left by a rotation; the orchestrator decrypts with them, too.
    master_key_retired: tuple[Path, ...] = ()
    #: Ed25519 key and launch secret of the orchestrator.
    orchestrator_key_file: Path = Path(".berth/keys/orchestrator.key")

    # API
    api_host: str = "127.0.0.1"
    api_port: int = 8000
    api_processes: int = Field(default=2, ge=1)
    #: How long `POST …/orders` waits for the answer before it returns 202, unless `wait` says otherwise.
    order_wait: float = 10.0
    #: Default time to live of an order request until the broker call.
    order_deadline: float = 30.0
    #: What an order of unknown outcome blocks: further orders of its account in its `symbol`, of the whole
    #: `account`, or nothing (`off`).
    unknown_blocks: Literal["symbol", "account", "off"] = "symbol"
    #: How long a verified API key is trusted before the database is asked again.
    api_key_cache: float = 10.0
    #: Calls of one webhook in a minute.
    webhook_rate: int = Field(default=60, ge=1)
    #: How long an alert's sender waits for its outcome before it gets 202. TradingView gives up after 3 s.
    webhook_wait: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    #: Addresses or networks of proxies in front of the API, whose X-Forwarded-For is trusted.
    trusted_proxies: tuple[str, ...] = ()

    #: Most waiting jobs of one user.
    jobs_waiting: int = Field(default=100, ge=1)

    # Fleet of job runners (docs/how-to/run-jobs.md)
    #: The runner's name, which lasts across restarts; empty: `berth up` starts none.
    jobs_runner: str = "fleet"
    #: Queues it serves; `*` means all.
    jobs_queues: tuple[str, ...] = ("*",)
    #: Jobs that run at once, and jobs that one child process runs.
    jobs_slots: int = Field(default=1, ge=1, le=256)
    jobs_recycle: int = Field(default=1, ge=1)
    #: How long a silent runner counts as alive.
    jobs_lease: float = Field(default=5.0, ge=1, le=300)
    #: A collector that gets the events of jobs beside the log: `tcp://ADDRESS:PORT` or `unix:///PATH`.
    jobs_events_to: str = ""
    #: Files (mode 0600) with keys that sign webhooks, 32 bytes or more: the present one first. Empty: the
    #: fleet delivers none.
    webhook_key_files: tuple[Path, ...] = ()
    #: Whether webhooks may go to private addresses, and unencrypted to this machine.
    webhook_allow_private: bool = False
    #: The server that takes mails; empty: the fleet sends none. The password comes from a file (mode 0600).
    mail_host: str = ""
    mail_port: int = 587
    mail_security: Literal["starttls", "tls", "none"] = "starttls"
    mail_sender: str = ""
    mail_username: str = ""
    mail_password_file: str = ""

    # Daily statements (docs/how-to/run-jobs.md)
    #: `auto`: sent where a mail server or keys for webhooks are set; `on`: both ways, whatever this process
    #: knows of them; `off`: none.
    statements: Literal["auto", "on", "off"] = "auto"
    #: When the statements of the last ended trading day (`trading_day_end`) are sent: `HH:MM` in an IANA time
    #: zone.
    statements_at: str = Field(default="06:30", pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    statements_zone: str = "Asia/Taipei"
    #: Users a second.
    statements_rate: float = Field(default=5.0, gt=0)

    # Pre-trade checks; an account's own limits go before these
    #: Lots of one order; TWSE takes no more than 499.
    check_max_quantity: int = Field(default=499, ge=1)
    #: TWD of one order; 0: without a limit.
    check_max_notional: Decimal = Field(default=Decimal(0), ge=0)
    #: Whether to refuse a market order whose value cannot be checked because no price is known.
    check_unpriced: Literal["refuse", "allow"] = "refuse"
    #: Orders of an account in a day.
    check_daily_orders: int = Field(default=10_000, ge=0)
    #: How long an equal second order counts as a mistake; 0: never.
    check_duplicate_window: float = Field(default=0.0, ge=0)
    #: Whether symbols must be known and the market open: `real` leaves out the paper broker.
    check_symbols: Literal["off", "real", "all"] = "real"
    check_market_open: Literal["off", "real", "all"] = "real"
    #: CSV of all symbols, with the columns `symbol` and `lot` (TWD of one lot at a price of 1).
    symbols_file: str = ""
    #: JSON of days that differ from the exchanges' calendar: `closed`, or hours such as `09:00-11:00`.
    calendar_file: str = ""

    # Database
    #: Connections of one process for transactions (closing a position needs two), and as many again for
    #: single statements: orders and their events.
    database_pool: int = Field(default=8, ge=2)
    database_pool_wait: float = 2.0

    # Orchestrator
    #: Task queues that this orchestrator serves.
    task_queues: tuple[str, ...] = ("lifecycle", "launch", "orders", "bulk")
    #: The name of the ready file; it differs between orchestrators that share a data folder.
    orchestrator_name: str = "orchestrator"
    #: Temporal's worker deployment, and our version in it; empty: release and hash of the workflows' code.
    deployment_name: str = "berth"
    build_id: str = ""
    #: Whether this orchestrator makes its version the current one if it is newer.
    promote: bool = True
    #: Most workflows moved to a new version in a second.
    move_rate: float = Field(default=20.0, gt=0)
    #: Seconds that running activities get after SIGTERM. 3 s later an orchestrator ends in any case;
    #: `berth up` kills it after 15 s.
    stop_grace: float = Field(default=10.0, ge=0)
    #: Seconds between two checks for workflows of another version, while there are none.
    move_period: float = Field(default=15.0, gt=0)
    #: Whether an account that differs from the broker's books takes no orders until a person has looked.
    differences_block: bool = False
    #: How often the sweeper checks for orders that are not final some time after their acceptance.
    sweep_period: float = Field(default=0.5, gt=0)
    #: Seconds after which another sweeper takes over the orders of one that died. Longer than a round takes
    #: with servers that answer slowly (Valkey's socket timeout is 5 s).
    sweep_lease: float = Field(default=10.0, gt=0)
    #: First pause between two checks of a followed order; it doubles up to the longest.
    verify_pause: float = Field(default=2.0, gt=0)
    verify_longest_pause: float = Field(default=60.0, gt=0)
    #: How long no worker may have been able to submit an order before the broker's listings prove that it
    #: never arrived. Twice as long while the worker that may have submitted it lives.
    absent_after: float = Field(default=60.0, ge=0)
    #: How long the broker may be unreachable before an order goes to the list for a person.
    verify_patience: float = 900.0
    #: When all orders of a trading day have ended, in seconds after its midnight in Taiwan: 05:30 of the next
    #: day, after TAIFEX's night session.
    trading_day_end: float = 106_200.0
    launcher: str = "process"
    #: Launches a second of all orchestrators, and launches at once after a pause; Fargate's by default.
    launch_rate: float = Field(default=20.0, gt=0)
    launch_burst: int = Field(default=100, ge=1)
    #: Docker's socket, the workers' image, and the network from which they reach Valkey and the brokers.
    docker_socket: Path = Path("/var/run/docker.sock")
    docker_image: str = "berth-worker:0.1.0"
    docker_network: str = "bridge"
    #: The label of this installation's workers on a shared Docker daemon.
    docker_fleet: str = "berth"

    # Workers
    #: Valkey's URL for workers, if it differs (Docker, a proxy); empty: the same.
    worker_valkey_url: str = ""
    pool: str = "default"
    #: The pool's policy at its first start and when one of these changes; otherwise operators set it
    #: (docs/how-to/size-the-pool.md). Free workers to keep, and the least and most ever wanted (0: no limit).
    pool_target: int = Field(default=4, ge=0)
    pool_minimum: int = Field(default=0, ge=0)
    pool_maximum: int = Field(default=0, ge=0)
    #: Additional free workers: `3`, or `20%` of those in use.
    pool_buffer: str = "0"
    #: Keeps at least as many as were claimed in this many last minutes; 0: ignores demand.
    pool_demand_minutes: float = Field(default=0.0, ge=0)
    #: Workers in all, free and in use; 0: without a limit.
    pool_limit: int = Field(default=0, ge=0)
    #: How long surplus free workers are kept.
    pool_shrink_after: float = Field(default=300.0, ge=0)
    #: How long a launched worker may take to be ready, its host's start included (a cold one on ECS: 48 to
    #: 63 s); read when the pool's workflow begins.
    pool_launch_timeout: float = Field(default=30.0, gt=0)
    #: Hours with a target of their own.
    pool_windows: tuple[dict[str, Any], ...] = ()
    worker_version: str = "0.1.0"
    #: When the morning begins on weekdays in Taiwan, `HH:MM`; empty: never. It connects the users with orders
    #: in the last `morning_days` trading days within `morning_window`, with at most `morning_rate` logins a
    #: second and `morning_abreast` at the same time (docs/how-to/roll-out.md).
    morning_at: str = Field(default="08:00", pattern=r"^(([01]\d|2[0-3]):[0-5]\d)?$")
    morning_days: int = Field(default=5, ge=1, le=30)
    morning_window: float = Field(default=1200.0, gt=0)
    morning_rate: float = Field(default=5.0, gt=0)
    morning_abreast: int = Field(default=10, ge=1)
    mark_ttl: float = 30.0
    mark_period: float = 5.0
    #: How long a worker's session may stand still before it is replaced in place.
    pulse_timeout: float = 10.0
    #: How long a broker connection may be idle before it is pinged.
    health_period: float = 60.0
    #: How often the mark watcher reads all marks, and how long one must be missing before it acts.
    watch_period: float = 2.0
    watch_confirm: float = 5.0
    #: How often maintenance checks all workers, tasks and marks; 0: never. It acts on an anomaly only if a
    #: second check at least `maintenance_confirm` later finds it again.
    maintenance_period: float = Field(default=60.0, ge=0)
    maintenance_confirm: float = Field(default=40.0, ge=0)
    #: The share of a broker's limits that workers use; the rest is a margin.
    budget_share: float = Field(default=0.9, gt=0, le=1)
    #: The address from which brokers see the workers' calls; empty: calls are counted by person only. All
    #: calls from one address together may be those of `egress_persons` persons.
    egress_address: str = ""
    egress_persons: int = Field(default=10, ge=1)
    idle_timeout: float = 1800.0
    connect_attempts: int = Field(default=3, ge=1)
    connect_timeout: float = 20.0
    claim_timeout: float = 30.0

    log_level: str = Field(default="INFO", pattern=r"(?i)^(debug|info|warning|error|critical)$")

    def allowance(self) -> Allowance:
        """The brokers' limits as workers get them."""
        paper = BrokerLimits(
            connections=self.exchange_connections,
            logins_per_day=self.exchange_logins_per_day,
            orders_per_10s=self.exchange_orders_per_10s,
            queries_per_5s=self.exchange_queries_per_5s,
        )
        return Allowance(
            share=self.budget_share,
            egress=self.egress_address,
            egress_persons=self.egress_persons,
            paper=paper,
        )


class LocalSettings(BaseSettings):
    """Ports of the servers that `berth up` starts on 127.0.0.1 (the API's is `BERTH_API_PORT`)."""

    model_config = SettingsConfigDict(env_prefix="BERTH_LOCAL_", extra="ignore", frozen=True)

    #: Temporal's web UI.
    ui_port: int = 8233
    temporal_port: int = 7401
    valkey_port: int = 7402
    postgres_port: int = 7403
    exchange_port: int = 7404
    exchange_admin_port: int = 7405


class EcsSettings(BaseSettings):
    """The ECS launcher, for `BERTH_LAUNCHER=ecs` (docs/how-to/ecs.md lists what it needs)."""

    model_config = SettingsConfigDict(env_prefix="BERTH_ECS_", extra="ignore", frozen=True)

    #: Empty: as the AWS SDK finds it.
    region: str = ""
    cluster: str = "berth"
    #: `family`, `family:revision` or an ARN, and the worker's container in it.
    task_definition: str = "berth-worker"
    container: str = "worker"
    #: Capacity provider → weight; empty: the cluster's default strategy.
    capacity_providers: dict[str, int] = {}
    #: The provider whose number of hosts we set (empty: none, as on Fargate), spare hosts to keep warm, and
    #: the workers a second that must find room while a cold host starts.
    host_provider: str = ""
    hosts_warm: int = Field(default=1, ge=0)
    hosts_rate: float = Field(default=0.0, ge=0)
    #: `spread` over zones and hosts, `binpack` by memory, `none` where ECS has no say (Fargate).
    placement: Literal["spread", "binpack", "none"] = "binpack"
    #: For tasks with network interfaces of their own (awsvpc).
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    #: SQS queue of task state changes, one for each orchestrator, since a message is received once.
    queue_url: str = ""
    #: Seconds between two full listings while events arrive.
    listing_period: float = Field(default=600.0, gt=0)
    #: 64 bytes in base64, with which launch documents are encrypted.
    launch_key_file: Path = Path(".berth/keys/launch.key")
