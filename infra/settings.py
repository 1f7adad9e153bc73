"""The settings of all servers, read once from the environment (prefix `BERTH_`). Durations are
seconds.

What each one is for stands in `.env.example`, once; comments here say why a default or a bound is
what it is. A secret has no default: keys come from files. A file `berth_…` in `/run/secrets` (or in
the folder that `BERTH_SECRETS_DIR` names) replaces the variable of that name, so that a URL with a
password need not be in the environment.
"""

import os
import re
from datetime import time
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from infra.berth_jobs.options import JobDefaults
from infra.networks import parse_network
from worker_runtime.protocol.installed_brokers import paper_exchange
from worker_runtime.protocol.launch import DEFAULT_EGRESS_PERSONS, Allowance, BrokerLimits

#: Where Docker and ECS mount secrets, one file each; `berth up` has a folder for each of its
#: processes.
SECRETS_DIR = Path(os.environ.get("BERTH_SECRETS_DIR", "/run/secrets"))


#: Segments of letters, digits, `-`, `_`, `.` and `~`: what a path, a cookie and a template show as
#: they are.
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*", re.ASCII)


def _checked_root_path(text: str) -> str:
    """Return the root path without a slash at its end. Raises `ValueError`."""
    path = text.rstrip("/")
    if not _ROOT_PATH.fullmatch(path):
        raise ValueError(
            "a path such as /berth is needed: segments of letters, digits, -, _, . and ~"
        )
    if path.startswith(("/v1/", "/page/")) or path in ("/v1", "/page"):
        raise ValueError("/v1 and /page are the API's own: choose another path, such as /berth")
    return path


#: A pooler that gives each transaction another server connection.
_POOLED = re.compile(r"[?&]pooler=")


def _checked_direct_url(url: str, info: ValidationInfo) -> str:
    """Raises `ValueError` if sessions are needed and no address has them."""
    if _POOLED.search(url):
        raise ValueError("PostgreSQL's own address is needed: without pooler=")
    if not url and _POOLED.search(info.data.get("database_url", "")):
        raise ValueError(
            "PostgreSQL's own address is needed, because BERTH_DATABASE_URL says pooler=transaction"
        )
    return url


class Settings(BaseSettings):
    """Shared by API, orchestrator, node, exchange and CLI; each uses its part."""

    model_config = SettingsConfigDict(
        env_prefix="BERTH_",
        extra="ignore",
        frozen=True,
        secrets_dir=SECRETS_DIR if SECRETS_DIR.is_dir() else None,
    )

    # Where things are
    data_dir: Path = Path(".berth")
    valkey_url: str = Field(default="redis://127.0.0.1:6379/0", pattern="^(rediss?|unix)://")
    database_url: str = Field(
        default="postgresql+asyncpg://berth@127.0.0.1:5432/berth",
        pattern=r"^postgresql\+asyncpg://",
    )
    database_direct_url: Annotated[str, AfterValidator(_checked_direct_url)] = Field(
        default="", pattern=r"^(postgresql\+asyncpg://.*)?$", validate_default=True
    )
    database_owner_url: str = ""
    temporal_address: str = "127.0.0.1:7233"
    temporal_namespace: str = "default"
    temporal_ui_url: str = ""
    temporal_tls: bool = False
    temporal_ca_file: str = ""
    temporal_server_name: str = ""
    temporal_cert_file: str = ""
    temporal_cert_key_file: str = ""
    temporal_api_key_file: str = ""
    node_socket: Path = Path(".berth/node.sock")
    #: 60706 to 61183 belong to nobody on Linux with systemd.
    node_uids: str = Field(default="60707-61183", pattern=r"^(\d+-\d+)?$")
    exchange_address: str = "127.0.0.1:7500"
    #: JSON: by broker, what its adapter gets as options.
    broker_options: dict[str, dict[str, str]] = {}
    exchange_admin_url: str = "http://127.0.0.1:7501"

    # Paper exchange: limits of one person, who is banned beyond them (the defaults are the real
    # broker's)
    exchange_connections: int = Field(default=5, ge=0)
    exchange_logins_per_day: int = Field(default=1000, ge=0)
    exchange_orders_per_10s: int = Field(default=250, ge=0)
    exchange_queries_per_5s: int = Field(default=25, ge=0)
    exchange_day_begins: time = time()

    # Keys (files with mode 0600; made by `berth keys init`)
    master_kms_key: str = ""
    master_key_file: Path = Path(".berth/keys/master.key")
    master_public_file: Path = Path(".berth/keys/master.pub")
    master_key_retired: tuple[Path, ...] = ()
    orchestrator_key_dir: Path = Path(".berth/keys")
    message_key_file: Path = Path(".berth/keys/message.key")
    api_secret_file: Path = Path(".berth/keys/api.key")
    temporal_codec_key_file: str = ""
    temporal_codec_reads_clear: bool = False
    live_accounts: bool = True
    backup_recipients: tuple[str, ...] = ()
    #: Four files of PostgreSQL's log at least.
    backup_spool_bytes: int = Field(default=4 * 1024**3, ge=64 * 1024**2)
    secret_folders: dict[Path, str] = Field(default={})

    # Command line
    api_url: str = ""
    api_key_file: Path = Path(".berth/keys/admin.key")

    # API
    api_host: str = "127.0.0.1"
    api_port: int = 8000
    api_processes: int = Field(default=2, ge=1)
    api_root_path: Annotated[str, AfterValidator(_checked_root_path)] = ""
    #: Above the 60 s of AWS's load balancer, which would otherwise send a request into a connection
    #: that the API is closing; uvicorn's default is 5.
    api_keep_alive: int = Field(default=75, ge=1, le=86_400)
    order_wait: float = 10.0
    order_deadline: float = 30.0
    unknown_blocks: Literal["symbol", "account", "off"] = "symbol"
    api_key_cache: float = 10.0
    limit_key: float = Field(default=200.0, ge=0)
    limit_user: float = Field(default=300.0, ge=0)
    limit_address: float = Field(default=20.0, ge=0)
    webhook_rate: int = Field(default=60, ge=1)
    webhook_wait: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    trusted_proxies: tuple[
        Annotated[str, AfterValidator(lambda text: str(parse_network(text)))], ...
    ] = ()
    forwarded_header: Literal["X-Forwarded-For", "Forwarded"] = "X-Forwarded-For"

    jobs_waiting: int = Field(default=100, ge=1)

    # Fleets of job runners, and what their tiers need
    jobs_runner: str = "fleet"
    jobs_queues: tuple[str, ...] = ("*",)
    jobs_slots: int = Field(default=0, ge=0, le=256)
    jobs_recycle: int = Field(default=1, ge=1)
    jobs_runners: str = Field(default="1", pattern=r"^[1-9]\d{0,2}(-[1-9]\d{0,2})?$")
    jobs_wait: float = Field(default=5.0, gt=0)
    jobs_tiers: dict[str, str] = {}
    jobs_lease: float = Field(default=5.0, ge=1, le=300)
    jobs_key_file: str = ""
    # A fleet of an application's own job types
    jobs_application: str = Field(default="", pattern=r"^([a-z][a-z0-9-]{0,31})?$")
    jobs_modules: tuple[str, ...] = ()
    jobs_path: tuple[str, ...] = ()
    jobs_secrets_dir: str = ""
    # Own job types, where their declaration says nothing else
    jobs_timeout: float = Field(default=180.0, gt=0, le=86_400)
    jobs_attempts: int = Field(default=10, ge=1, le=1000)
    jobs_retry_delay: float = Field(default=120.0, ge=0, le=86_400)
    jobs_result_ttl: int = Field(default=500, ge=1, le=14 * 86_400)
    jobs_runner_ttl: int = Field(default=420, ge=10, le=86_400)
    jobs_timeout_margin: int = Field(default=60, ge=0, le=86_400)

    webhook_key_file: str = ""
    webhook_allow_private: bool = False
    mail_host: str = ""
    mail_port: int = 587
    mail_security: Literal["starttls", "tls", "none"] = "starttls"
    mail_sender: str = ""
    mail_username: str = ""
    mail_password_file: str = ""
    messaging_url: str = "https://api.twilio.com"
    messaging_account: str = ""
    messaging_token_file: str = ""
    messaging_sms_sender: str = ""
    messaging_whatsapp_sender: str = ""
    push_key_file: str = ""
    push_url: str = "https://fcm.googleapis.com"

    # Daily statements (docs/how-to/run-jobs.md)
    statements: Literal["auto", "on", "off"] = "auto"
    statements_at: str = Field(default="06:30", pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    #: Empty: that of the home markets.
    statements_zone: str = ""
    statements_rate: float = Field(default=5.0, gt=0)

    # Daily report to operators (docs/how-to/read-reports.md)
    report_at: str = Field(default="08:00", pattern=r"^(([01]\d|2[0-3]):[0-5]\d)?$")
    report_to: tuple[Annotated[str, Field(pattern=r"^[^@\s]+@[^@\s]+$")], ...] = ()

    # Pre-trade checks; an account's own limits go before these
    #: The most that the home stock market takes.
    check_max_quantity: int = Field(default=499, ge=1)
    #: Ten contracts of TX in 2026.
    check_max_notional: Decimal = Field(default=Decimal(50_000_000), ge=0, lt=10**12)
    #: `market`: the daily limit that the broker's record names, if it names one.
    check_price_band: Literal["market"] | Annotated[Decimal, Field(ge=0, le=1)] = "market"
    check_daily_orders: int = Field(default=10_000, ge=0)
    #: Longer than a double click.
    check_duplicate_window: float = Field(default=2.0, ge=0, le=86_400)
    check_symbols: Literal["off", "real", "all"] = "real"
    check_market_open: Literal["off", "real", "all"] = "real"
    check_prices: Literal["off", "real", "all"] = "real"
    symbols_file: str = ""
    calendar_file: str = ""

    # Database
    #: Closing a position needs two.
    database_pool: int = Field(default=8, ge=2)
    database_pool_wait: float = 2.0

    # Orchestrator
    task_queues: tuple[str, ...] = ("lifecycle", "launch", "orders", "bulk")
    orchestrator_name: str = "orchestrator"
    deployment_name: str = "berth"
    build_id: str = ""
    promote: bool = True
    #: `berth up` kills an orchestrator after 15 s.
    stop_grace: float = Field(default=10.0, ge=0)
    #: With the second look 10 s later, what somebody ended is back within a minute.
    entity_period: float = Field(default=45.0, gt=0)
    differences_block: bool = False
    sweep_period: float = Field(default=0.5, gt=0)
    absent_after: float = Field(default=60.0, ge=0)
    verify_patience: float = 900.0
    #: 05:30 of the next day, after the night session of futures.
    trading_day_end: float = 106_200.0
    launcher: Literal["process", "docker", "ecs"] = "process"
    #: Fargate's.
    launch_rate: float = Field(default=20.0, gt=0)
    launch_burst: int = Field(default=100, ge=1)
    docker_socket: Path = Path("/var/run/docker.sock")
    docker_image: str = "berth-worker:0.1.0"
    docker_network: str = "bridge"
    docker_fleet: str = "berth"

    # Workers
    worker_valkey_url: str = ""
    valkey_users: bool = False
    pool: str = "default"
    pool_target: int = Field(default=4, ge=0)
    pool_minimum: int = Field(default=0, ge=0)
    pool_maximum: int = Field(default=0, ge=0)
    pool_buffer: str = "0"
    pool_demand_minutes: float = Field(default=0.0, ge=0)
    pool_limit: int = Field(default=0, ge=0)
    pool_shrink_after: float = Field(default=300.0, ge=0)
    pool_windows: tuple[dict[str, Any], ...] = ()
    worker_version: str = "0.1.0"
    morning_at: str = Field(default="08:00", pattern=r"^(([01]\d|2[0-3]):[0-5]\d)?$")
    evening_at: str = Field(default="14:30", pattern=r"^(([01]\d|2[0-3]):[0-5]\d)?$")
    morning_days: int = Field(default=5, ge=1, le=30)
    morning_window: float = Field(default=1200.0, gt=0)
    morning_rate: float = Field(default=5.0, gt=0)
    morning_abreast: int = Field(default=10, ge=1)
    instruments_pool: str = Field(default="instruments", min_length=1)
    #: A list of some 40,000 instruments takes minutes; the rest is for brokers that list late.
    instruments_lead: float = Field(default=5400.0, ge=0, le=86_400)
    mark_ttl: float = 30.0
    mark_period: float = 5.0
    pulse_timeout: float = 3.0
    health_period: float = 60.0
    maintenance_period: float = Field(default=60.0, ge=0)
    worker_history_days: int = Field(default=90, ge=7)
    dead_letter_days: int = Field(default=14, ge=1, le=14)
    alert_days: int = Field(default=30, ge=1)
    order_days: int = Field(default=2557, ge=90)
    audit_days: int = Field(default=2557, ge=366)
    budget_share: float = Field(default=0.9, gt=0, le=1)
    egress_address: str = ""
    egress_persons: int = Field(default=DEFAULT_EGRESS_PERSONS, ge=1)
    idle_timeout: float = 1800.0
    connect_attempts: int = Field(default=3, ge=1)
    connect_timeout: float = 20.0
    claim_timeout: float = 30.0
    launch_timeout: float = Field(default=90.0, gt=0)

    # Operators' alerts (docs/how-to/be-called.md)
    alert_mails: tuple[str, ...] = ()
    alert_webhooks: tuple[str, ...] = ()
    alert_window: float = Field(default=900.0, ge=10)
    alert_limit: int = Field(default=20, ge=1)

    metrics_address: str = Field(default="", pattern=r"^(.+:\d+)?$")
    traces_url: str = Field(default="", pattern=r"^(https?://.+)?$")
    log_level: str = Field(default="INFO", pattern=r"(?i)^(debug|info|warning|error|critical)$")

    @property
    def session_database_url(self) -> str:
        """The address for what needs a session of its own: advisory locks that are held, LISTEN,
        migrations, backups."""
        return self.database_direct_url or self.database_url

    @property
    def job_defaults(self) -> JobDefaults:
        """Returns the options of own jobs for which neither the type nor the call has a value."""
        return JobDefaults(
            timeout=self.jobs_timeout,
            attempts=self.jobs_attempts,
            retry_delay=self.jobs_retry_delay,
            result_ttl=self.jobs_result_ttl,
        )

    @property
    def runner_bounds(self) -> tuple[int, int]:
        lowest, _, highest = self.jobs_runners.partition("-")
        return int(lowest), max(int(lowest), int(highest or lowest))

    def price_band(self, daily_limit: Decimal | None) -> Decimal | None:
        """Return the band of accounts without one of their own, in a market with this daily limit;
        None: any price."""
        band = daily_limit if self.check_price_band == "market" else self.check_price_band
        return band or None

    @property
    def sends_alerts(self) -> bool:
        return bool(self.alert_mails or self.alert_webhooks)

    def allowance(self) -> Allowance:
        """Returns the brokers' limits as workers get them, but for the names of the address's
        budgets."""
        paper = BrokerLimits(
            connections=self.exchange_connections,
            logins_per_day=self.exchange_logins_per_day,
            orders_per_10s=self.exchange_orders_per_10s,
            queries_per_5s=self.exchange_queries_per_5s,
        )
        return Allowance(
            share=self.budget_share,
            egress_persons=self.egress_persons,
            paper=paper,
            limits={paper_exchange(): paper},
        )


class LocalSettings(BaseSettings):
    """Holds what `berth up` needs besides `Settings`: the ports of the servers that it starts on
    127.0.0.1.

    The API's port is `BERTH_API_PORT`.
    """

    model_config = SettingsConfigDict(env_prefix="BERTH_LOCAL_", extra="ignore", frozen=True)

    ui_port: int = 8233
    temporal_port: int = 7401
    valkey_port: int = 7402
    postgres_port: int = 7403
    exchange_port: int = 7404
    exchange_admin_port: int = 7405
    live_accounts: bool = False
    pass_environment: tuple[str, ...] = ()


class EcsSettings(BaseSettings):
    """The ECS launcher, for `BERTH_LAUNCHER=ecs` (docs/how-to/ecs.md lists what it needs)."""

    model_config = SettingsConfigDict(env_prefix="BERTH_ECS_", extra="ignore", frozen=True)

    region: str = ""
    cluster: str = "berth"
    task_definition: str = "berth-worker"
    container: str = "worker"
    capacity_providers: dict[str, int] = {}
    host_provider: str = ""
    hosts_warm: int = Field(default=1, ge=0)
    hosts_rate: float = Field(default=0.0, ge=0)
    placement: Literal["spread", "binpack", "none"] = "binpack"
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    queue_url: str = ""
    listing_period: float = Field(default=600.0, gt=0)
    launch_key_file: Path = Path(".berth/keys/launch-document.key")


S = TypeVar("S", bound=BaseSettings)


def read_settings(kind: type[S], **given: Any) -> S:
    """Reads the settings of a process that begins; `given` go before the environment.

    Those that are not valid end the process, with a sentence for each that does not quote it.
    """
    try:
        return kind(**given)
    except ValidationError as error:
        wrong = [(str(problem["loc"][0]), problem["msg"]) for problem in error.errors()]
    except SettingsError as error:  # it says the field in words only
        wrong = [
            (name, "it is not the JSON of a list or object") for name in str(error).split('"')[1:2]
        ]
    prefix = kind.model_config["env_prefix"]
    raise SystemExit("\n".join(f"error: {prefix}{name.upper()}: {why}" for name, why in wrong))
