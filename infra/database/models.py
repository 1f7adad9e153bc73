"""The tables of users, accounts, orders and workers.
Times are UTC; secrets are stored as ciphertext only."""

import uuid
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Date,
    DateTime,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    LargeBinary,
    Numeric,
    SmallInteger,
    String,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, Insert, insert
from sqlalchemy.orm import DeclarativeBase, Mapped, composite, mapped_column, relationship


class Base(DeclarativeBase):
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSONB,
        Decimal: Numeric(18, 6),
        bytes: LargeBinary,
    }


def of_account() -> ForeignKeyConstraint:
    """Makes the foreign key of rows that belong to a broker account, by `user_id` and
    `account_id`."""
    return ForeignKeyConstraint(
        ["user_id", "account_id"], ["broker_accounts.user_id", "broker_accounts.account_id"]
    )


def by_time(name: str, column: str) -> Index:
    """Makes an index for rows that lie in the order of this time: some bytes for a megabyte of
    them."""
    return Index(name, column, postgresql_using="brin", postgresql_with={"autosummarize": "on"})


def partial(name: str, condition: str, *columns: str, **options: Any) -> Index:
    return Index(name, *columns, postgresql_where=text(condition), **options)


_ACCOUNT, _FILL = ("user_id", "account_id"), ("symbol", "side", "lot", "filled_quantity")


def upsert(
    model: type[Base], key: dict[str, Any], values: dict[str, Any], **changed: Any
) -> Insert:
    """Inserts the row of this key, or sets its `values` and what is in `changed`."""
    return (
        insert(model)
        .values(**key, **values)
        .on_conflict_do_update(index_elements=list(key), set_={**values, **changed})
    )


class User(Base):
    __tablename__ = "users"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    #: The last epoch assigned to a worker of this user;
    #: it only grows, so a removed user's row stays.
    epoch: Mapped[int] = mapped_column(BigInteger, server_default="0")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    disabled_at: Mapped[datetime | None]
    removed_at: Mapped[datetime | None]


#: Begins the role word of an API key with scopes.
#: The release before does not know it, and refuses the key.
SCOPED = "scoped_"


class ApiKey(Base):
    __tablename__ = "api_keys"
    __table_args__ = (
        CheckConstraint(
            "role in ('user', 'operator', 'admin', 'scoped_user', 'scoped_operator', "
            "'scoped_admin')",
            name="api_keys_role",
        ),
        # For the foreign key: each key that is deleted is looked for among them.
        partial("api_keys_by_session", "session_of is not null", "session_of"),
        partial("api_keys_made_by", "made_by is not null", "made_by"),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    #: SHA-256 of a random 256-bit token, hex. A fast hash is right for a key that nobody can guess.
    key_hash: Mapped[str] = mapped_column(String(64), unique=True)
    prefix: Mapped[str] = mapped_column(String(16))
    #: `user`, `operator` or `admin`; with `SCOPED` in front of it for a key with scopes.
    role_word: Mapped[str] = mapped_column("role", String(16))
    user_id: Mapped[str | None] = mapped_column(ForeignKey("users.id"))
    #: The scopes of a key that has scopes; empty for a key of before, which may do all that its
    #: role may do.
    scope_words: Mapped[list[str]] = mapped_column("scopes", ARRAY(String(32)), server_default="{}")
    #: Addresses or networks that may use it; empty means all.
    sources: Mapped[list[str]] = mapped_column(ARRAY(String(64)), server_default="{}")
    #: Seconds for which it was made,
    #: and for which one that replaces it is made; null: it does not end.
    life_s: Mapped[int | None] = mapped_column(BigInteger)
    #: The API key that made it; null for those of before, and for those of the command line.
    made_by: Mapped[uuid.UUID | None]
    #: The purpose of the key, in the words of whoever made it.
    label: Mapped[str] = mapped_column(String(128), server_default="")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_used_at: Mapped[datetime | None]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    #: The key with which somebody logged in to the fleet page:
    #: this one is that session's, and ends with it.
    session_of: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("api_keys.id"))

    @property
    def role(self) -> str:
        return self.role_word.removeprefix(SCOPED)

    @property
    def scopes(self) -> list[str] | None:
        """Returns what the key may do; None: all that its role may do, as keys of before."""
        return self.scope_words if self.role_word.startswith(SCOPED) else None


class DailyActs(Base):
    """Counts the audited acts that a user has asked for on a day of the home markets
    (`quotas.py`)."""

    __tablename__ = "daily_acts"

    user_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    day: Mapped[date] = mapped_column(Date, primary_key=True)
    acts: Mapped[int]


class AllowedImage(Base):
    """An image that workers may be launched from (`images.py`)."""

    __tablename__ = "allowed_images"

    image: Mapped[str] = mapped_column(String(512), primary_key=True)
    actor: Mapped[str] = mapped_column(String(128))
    reason: Mapped[str]
    added_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class StatementAddress(Base):
    """Where a user's daily statements go; a null means not there."""

    __tablename__ = "statement_addresses"

    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    email: Mapped[str | None] = mapped_column(String(254))
    webhook_url: Mapped[str | None] = mapped_column(String(2048))
    updated_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class BrokerAccount(Base):
    __tablename__ = "broker_accounts"
    __table_args__ = (
        partial(
            "broker_accounts_by_certificate",
            "certificate_expires_at is not null",
            "certificate_expires_at",
        ),
    )

    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    account_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    broker: Mapped[str] = mapped_column(String(32))
    broker_type: Mapped[str] = mapped_column(String(32))
    simulation: Mapped[bool]
    #: The broker's own id of the account; '': the same as ours.
    number: Mapped[str] = mapped_column(String(64), server_default="")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    #: The epoch of the newest report by a worker's session: an earlier one that comes again changes
    #: nothing.
    reported_epoch: Mapped[int] = mapped_column(BigInteger, server_default="0")
    #: Unix milliseconds, by the clock of that worker's host.
    reported_ms: Mapped[int] = mapped_column(BigInteger, server_default="0")
    #: The login's state by the newest report: the code of what is wrong ('': there is a session),
    #: in words, and the worker's epoch and Unix milliseconds. It says nothing once that worker has
    #: ended.
    login_code: Mapped[str] = mapped_column(String(64), server_default="")
    login_detail: Mapped[str] = mapped_column(server_default="")
    login_epoch: Mapped[int] = mapped_column(BigInteger, server_default="0")
    login_ms: Mapped[int] = mapped_column(BigInteger, server_default="0")
    #: The newest version of the credentials that the broker has rejected; `login_detail` says why.
    rejected_version: Mapped[int] = mapped_column(server_default="0")
    #: That is the version stored, and no session with an older one is up: orders are refused.
    login_rejected: Mapped[bool] = mapped_column(server_default=text("false"))
    #: When the certificate that signs orders expires, as read when it was stored, or as a worker's
    #: session said; null: there is none, or nobody could read it.
    certificate_expires_at: Mapped[datetime | None]
    #: The last warning of it that was given, in days ahead (`infra/database/certificates.py`).
    certificate_warned_days: Mapped[int | None] = mapped_column(SmallInteger)


@dataclass(frozen=True)
class EncryptedCredentials:
    """Credentials as they are stored: AES-256-GCM under a data key, which the master key wraps."""

    ciphertext: bytes
    nonce: bytes
    wrapped_key: bytes
    master_key_id: str


class StoredCredentials(Base):
    __tablename__ = "credentials"
    __table_args__ = (
        of_account(),
        Index("credentials_by_person", "persons", postgresql_using="gin"),
        partial("credentials_to_match", "match_due", "user_id", "account_id"),
    )

    user_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    account_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    #: Grows with each change: a worker reconnects only accounts whose version has grown.
    version: Mapped[int]
    ciphertext: Mapped[bytes]
    nonce: Mapped[bytes]
    wrapped_key: Mapped[bytes]
    master_key_id: Mapped[str] = mapped_column(String(128))
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())
    #: Keyed hashes of the person whom the credentials of `sealed_version` name, one for each
    #: version of the budget key: whoever typed it may have made it up.
    persons: Mapped[list[str]] = mapped_column(JSONB, server_default="[]")
    #: The newest version that was sealed to a worker, and the newest with which one has logged in.
    sealed_version: Mapped[int] = mapped_column(server_default="0")
    confirmed_version: Mapped[int] = mapped_column(server_default="0")
    #: Other users of the same person are still to be looked for (`budgets.find_matches`).
    match_due: Mapped[bool] = mapped_column(server_default=text("false"))
    encrypted: Mapped[EncryptedCredentials] = composite(
        "ciphertext", "nonce", "wrapped_key", "master_key_id"
    )
    account: Mapped[BrokerAccount] = relationship(lazy="joined", innerjoin=True, viewonly=True)


class FailedLogin(Base):
    """A login that a broker rejected. Without a foreign key:
    whoever records it holds other users' rows."""

    __tablename__ = "failed_logins"
    __table_args__ = (Index("failed_logins_by_user", "user_id", "at"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    user_id: Mapped[str] = mapped_column(String(64))
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Order(Base):
    __tablename__ = "orders"
    __table_args__ = (
        UniqueConstraint("user_id", "client_order_id", name="orders_client_order_id"),
        UniqueConstraint("user_id", "account_id", "trading_day", "tag", name="orders_tag"),
        CheckConstraint("quantity > 0", name="orders_quantity"),
        Index("orders_by_user", "user_id", "created_at"),
        Index("orders_by_state", "state", "updated_at"),
        Index("orders_by_change", "user_id", "changed"),
        by_time("orders_by_time", "created_at"),
        # For the check of each new order. `orders_by_state` would also visit every order that was
        # submitting since the last vacuum: 6 to 16 ms after 20,000 orders.
        partial("orders_unsettled", "state in ('unknown', 'submitting')", *_ACCOUNT),
        partial("orders_to_verify", "verify_at is not null", "verify_at"),
        # For comparisons with the broker's books, which would read all that an account ever
        # ordered. An order enters them after its acceptance.
        partial("orders_by_broker_id", "broker_order_id is not null", *_ACCOUNT, "broker_order_id"),
        partial("orders_filled", "filled_quantity > 0", *_ACCOUNT, postgresql_include=list(_FILL)),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(String(64))
    account_id: Mapped[str] = mapped_column(String(64))
    client_order_id: Mapped[str] = mapped_column(String(64))
    #: SHA-256 of the request, so that a repeat with another body is detected.
    fingerprint: Mapped[str] = mapped_column(String(64))
    symbol: Mapped[str] = mapped_column(String(32))
    side: Mapped[str] = mapped_column(String(8))
    quantity: Mapped[int]
    price_type: Mapped[str] = mapped_column(String(8))
    price: Mapped[Decimal | None]
    time_in_force: Mapped[str] = mapped_column(String(8))
    #: The kind of lot. Quantities of an odd lot are shares.
    lot: Mapped[str] = mapped_column(String(16), server_default="common")
    condition: Mapped[str] = mapped_column(String(16), server_default="cash")
    open_close: Mapped[str] = mapped_column(String(16), server_default="auto")
    #: The only id of ours that the broker keeps; `orders/acceptance.py` makes it.
    tag: Mapped[str] = mapped_column(String(6))
    trading_day: Mapped[date] = mapped_column(Date)
    state: Mapped[str] = mapped_column(String(16))
    reason_code: Mapped[str | None] = mapped_column(String(64))
    reason: Mapped[str | None]
    broker_order_id: Mapped[str | None] = mapped_column(String(64))
    filled_quantity: Mapped[int] = mapped_column(server_default="0")
    average_price: Mapped[Decimal | None]
    #: Valkey's generation when the order was accepted.
    generation: Mapped[str] = mapped_column(String(64))
    #: The epoch of the first worker that can have got it: no former one answers for it.
    first_epoch: Mapped[int] = mapped_column(BigInteger, server_default="0")
    deadline_at: Mapped[datetime]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    updated_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    #: The order can only make a position smaller, so a switch that says REDUCING lets it pass.
    reduce_only: Mapped[bool] = mapped_column(server_default=text("false"))
    #: The request that this order is a part of, if there was one:
    #: a reversal, a webhook, a closed position.
    origin: Mapped[str] = mapped_column(String(64), server_default="")
    #: When the sweeper checks it; null once it is final or its workflow follows it.
    verify_at: Mapped[datetime | None] = mapped_column(
        server_default=text("clock_timestamp() + interval '2 seconds'")
    )
    #: Why a person has to look at the order; null:
    #: nobody has to. `state` stays what is known of it.
    attention: Mapped[str | None]
    attention_at: Mapped[datetime | None]
    #: The transaction that last changed what is shown of it; a trigger keeps it (`orders/feed.py`).
    changed: Mapped[int] = mapped_column(
        BigInteger, server_default=text("cast(cast(pg_current_xact_id() as text) as bigint)")
    )


class OrderTag(Base):
    """The last tag number used for an account on a trading day."""

    __tablename__ = "order_tags"
    __table_args__ = (by_time("order_tags_by_day", "trading_day"),)

    user_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    account_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    trading_day: Mapped[date] = mapped_column(Date, primary_key=True)
    last: Mapped[int] = mapped_column(BigInteger)
    #: The number of tags that were used: at least as many as there are orders. 0.1.0 does not count
    #: here.
    used: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))


class OrderEventRow(Base):
    __tablename__ = "order_events"
    __table_args__ = (Index("order_events_by_order", "order_id", "at"),)

    event_id: Mapped[str] = mapped_column(String(160), primary_key=True)
    order_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("orders.id"))
    state: Mapped[str] = mapped_column(String(16))
    #: When it happened, by the clock of the process that observed it.
    at: Mapped[datetime]
    data: Mapped[dict[str, Any]]
    recorded_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class WorkerSession(Base):
    """An assignment of a worker to a user, and the source of its epoch."""

    __tablename__ = "worker_sessions"
    __table_args__ = (
        UniqueConstraint("user_id", "epoch", name="worker_sessions_epoch"),
        # A worker has one assignment, ever: what it learnt of one user never reaches another.
        UniqueConstraint("worker_id", name="worker_sessions_by_worker"),
        # The crashes of one user, for a claim.
        partial("worker_sessions_crashed", "crashed", "user_id", "ended_at"),
        # All open claims, for the watcher and maintenance: a small part of a table that only grows.
        partial("worker_sessions_unended", "ended_at is null", "user_id"),
        # The claims of a pool's last minutes, for its size.
        Index("worker_sessions_by_claim_time", "pool", "claimed_at"),
        # Those that are old enough to be deleted.
        Index("worker_sessions_by_end", "ended_at"),
    )

    claim_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    epoch: Mapped[int] = mapped_column(BigInteger)
    pool: Mapped[str] = mapped_column(String(64))
    worker_id: Mapped[str | None] = mapped_column(String(128))
    task_id: Mapped[str | None] = mapped_column(String(256))
    warm: Mapped[bool | None]
    assigned_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    claimed_at: Mapped[datetime | None]
    connected_at: Mapped[datetime | None]
    #: Its epoch was taken from it, because nobody could confirm its end.
    fenced_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    end_reason: Mapped[str | None]
    #: The worker died in service or could not reconnect its broker, at `ended_at`.
    crashed: Mapped[bool] = mapped_column(server_default=text("false"))
    #: Names of the budgets that its worker may use; null:
    #: sealed by 0.1.0, which counts by person alone.
    budgets: Mapped[list[str] | None] = mapped_column(JSONB)


class PersonMatch(Base):
    """Two users of a broker who log in as one person, for an operator (`budgets.py`)."""

    __tablename__ = "person_matches"
    __table_args__ = (
        Index("person_matches_by_user", "first_user"),
        Index("person_matches_by_other_user", "second_user"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    broker: Mapped[str] = mapped_column(String(32))
    #: In the order of their ids.
    first_user: Mapped[str] = mapped_column(ForeignKey("users.id"))
    second_user: Mapped[str] = mapped_column(ForeignKey("users.id"))
    #: As in `StoredCredentials`.
    persons: Mapped[list[str]] = mapped_column(JSONB)
    found_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    #: Number of the budget that linked users share; null: each has their own.
    shared_budget: Mapped[int | None] = mapped_column(BigInteger)
    #: Null: it waits for an operator.
    resolved_at: Mapped[datetime | None]
    resolved_by: Mapped[str | None] = mapped_column(String(128))


class WorkerLaunch(Base):
    """A worker that the orchestrator launched, written before its launcher is asked.

    A claim takes only workers with such a row, and believes it and not what their entries say.
    """

    __tablename__ = "worker_launches"
    __table_args__ = (Index("worker_launches_by_time", "launched_at"),)

    worker_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    pool: Mapped[str] = mapped_column(String(64))
    version: Mapped[str] = mapped_column(String(128))
    #: Null until the launcher has answered.
    task_id: Mapped[str | None] = mapped_column(String(256))
    launched_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class WorkerTransition(Base):
    """A change of state of a user's worker, as its workflow recorded it.

    It has no foreign key on the user:
    the workflow of a user who does not exist has a timeline, too.
    """

    __tablename__ = "worker_transitions"
    __table_args__ = (
        UniqueConstraint("chain", "number", name="worker_transitions_number"),
        Index("worker_transitions_by_user", "user_id", "id"),
        by_time("worker_transitions_by_time", "recorded_at"),
    )

    #: Grows in the order of commits within one user's rows,
    #: so a reader may continue after the last one.
    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    user_id: Mapped[str] = mapped_column(String(64))
    #: The id of the first run in a chain of runs; `number` grows by one within the chain.
    chain: Mapped[str] = mapped_column(String(128))
    number: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[datetime]
    before: Mapped[str] = mapped_column(String(32))
    after: Mapped[str] = mapped_column(String(32))
    reason: Mapped[str]
    worker_id: Mapped[str] = mapped_column(String(128))
    epoch: Mapped[int] = mapped_column(BigInteger)
    #: Until when the new state may last; null for a final state.
    deadline: Mapped[datetime | None]
    recorded_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class WorkerScript(Base):
    """A Lua script that workers run, of this release or another one."""

    __tablename__ = "worker_scripts"

    sha: Mapped[str] = mapped_column(String(40), primary_key=True)
    source: Mapped[str]
    seen_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class PoolRow(Base):
    """The settings that operators have made for a pool. Its workflow writes them, and reads them
    when it was started anew."""

    __tablename__ = "pools"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    #: Grows with each change: an older state never overwrites a newer one.
    number: Mapped[int] = mapped_column(BigInteger)
    #: `workflows.worker_pool.messages.KeptPool` as a plain dict.
    settings: Mapped[dict[str, Any]]
    changed_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class EntityFinding(Base):
    """A long-lived workflow or schedule that was found missing or paused, and what came of it."""

    __tablename__ = "entity_findings"
    __table_args__ = (Index("entity_findings_by_time", "seen_at"),)

    #: The workflow's id, or `schedule:` and the schedule's.
    entity: Mapped[str] = mapped_column(String(160), primary_key=True)
    #: `pool`, `user`, `order`, `schedule`, or `run` of a schedule or rollout.
    kind: Mapped[str] = mapped_column(String(32))
    #: `missing`, `paused`, `rebuilt`, `ended` (nobody starts it again), `resumed`.
    state: Mapped[str] = mapped_column(String(16))
    #: Such as "terminated: by hand".
    reason: Mapped[str]
    #: Since when it is in this state.
    since: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    #: When it was last seen in this state.
    seen_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class AuditEntry(Base):
    """Append-only: a trigger refuses UPDATE and DELETE. No secret in it."""

    __tablename__ = "audit_trail"
    __table_args__ = (
        Index("audit_trail_by_subject", "subject", "id"),
        by_time("audit_trail_by_time", "at"),
        # What people did stands between thousands of orders.
        partial("audit_trail_but_orders", "action <> 'order.accepted'", "id"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    actor: Mapped[str] = mapped_column(String(128))
    action: Mapped[str] = mapped_column(String(64))
    subject: Mapped[str] = mapped_column(String(160))
    data: Mapped[dict[str, Any]]
