"""All settings of the servers, read once from the environment (prefix `BERTH_`). Durations are seconds.

`.env.example` lists every variable. A secret has no default: keys come from files. In a container, a file
`/run/secrets/berth_…` stands for the variable of that name, so that a URL with a password in it need not be
in the environment.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

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

    # Keys (files with mode 0600; made by `berth keys init`)
    #: Private half of the master key: the orchestrator alone reads it.
    master_key_file: Path = Path(".berth/keys/master.key")
    #: Public half: enough for the API to encrypt.
    master_public_file: Path = Path(".berth/keys/master.pub")
    #: Private halves of earlier master keys, which a rotation left: the orchestrator decrypts with them, too.
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
    #: How long a verified API key is trusted without asking the database again.
    api_key_cache: float = 10.0

    # Database
    database_pool: int = Field(default=8, ge=1)
    database_pool_wait: float = 2.0

    # Orchestrator
    #: Task queues that this orchestrator serves.
    task_queues: tuple[str, ...] = ("lifecycle", "launch", "orders", "bulk")
    launcher: str = "process"
    launch_rate: float = 20.0

    # Workers
    pool: str = "default"
    pool_target: int = Field(default=4, ge=0)
    worker_version: str = "0.1.0"
    mark_ttl: float = 30.0
    mark_period: float = 5.0
    idle_timeout: float = 1800.0
    connect_attempts: int = Field(default=3, ge=1)
    connect_timeout: float = 20.0
    claim_timeout: float = 30.0

    log_level: str = "INFO"


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
