"""The exchange's accounts: their keys, their person and their behaviour."""

from __future__ import annotations

import hmac
from collections import Counter
from dataclasses import dataclass, replace
from hashlib import blake2b

import structlog

from infra.exchange.behaviour import ALL_ACCOUNTS, Behaviour, FaultPlan, FaultPoint, FaultSchedule
from infra.exchange.ledger import ExchangeLedger
from infra.exchange.records import AccountRegistration
from worker_runtime.brokers.paper.wire import Login
from worker_runtime.protocol.errors import LoginRejected, UnknownAccount

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class ExchangeAccount:
    """An account; only a hash of its keys is stored."""

    key_hash: bytes
    person_id: str
    behaviour: Behaviour


class ExchangeAccounts:
    """All accounts, read from the ledger at the start and written through to it."""

    def __init__(self, ledger: ExchangeLedger) -> None:
        self._ledger = ledger
        self.schedule = FaultSchedule(ledger)
        self._accounts = {
            name: ExchangeAccount(
                key_hash=key_hash,
                person_id=person_id,
                behaviour=Behaviour.model_validate_json(behaviour),
            )
            for name, key_hash, person_id, behaviour in ledger.accounts()
        }
        #: Cancels and replacements that arrived, by account.
        self.received_changes: Counter[str] = Counter()
        #: Accounts with ordered faults.
        self._faulty: set[str] = set()
        for name in self._accounts:
            self._index_faults(name)

    def register(self, registration: AccountRegistration) -> None:
        """Adds an account, or replaces its keys; its behaviour stays."""
        known = self._accounts.get(registration.account)
        account = ExchangeAccount(
            key_hash=_key_hash(registration.account, registration.api_key, registration.secret_key),
            person_id=registration.person_id or registration.account,
            behaviour=known.behaviour if known else Behaviour(),
        )
        self._save(registration.account, account)

    def check_login(self, request: Login) -> str:
        """Returns the person id of a valid login; raises `LoginRejected`."""
        account = self._accounts.get(request.account)
        offered = _key_hash(request.account, request.api_key, request.secret_key)
        if account is None or not hmac.compare_digest(account.key_hash, offered):
            raise LoginRejected("unknown account or wrong key")
        if request.person_id and request.person_id != account.person_id:
            raise LoginRejected("the account belongs to another person")
        return account.person_id

    def behaviour(self, name: str) -> Behaviour:
        """Raises `UnknownAccount`."""
        return self._account(name).behaviour

    def set_behaviour(self, name: str, behaviour: Behaviour) -> None:
        """Raises `UnknownAccount`."""
        self._save(name, replace(self._account(name), behaviour=behaviour))

    def fault_plan(self, name: str) -> FaultPlan:
        """Raises `UnknownAccount`, unless it is that of `ALL_ACCOUNTS`."""
        if name != ALL_ACCOUNTS:
            self._account(name)
        return self.schedule.get(name)

    def set_fault_plan(self, name: str, plan: FaultPlan) -> None:
        """Raises `UnknownAccount`, unless it is for `ALL_ACCOUNTS`."""
        if name != ALL_ACCOUNTS:
            self._account(name)
        self.schedule.set(name, plan)

    def login_latency(self, name: str) -> float:
        """Returns the seconds that a login takes; 0 for an account that does not exist."""
        known = self._accounts.get(name)
        return known.behaviour.login_latency_ms / 1000 if known else 0.0

    def fault_hits(self, name: str, point: FaultPoint) -> bool:
        """Returns True if a fault hits now. An ordered fault comes first and is used up; then the
        random plan."""
        if name not in self._faulty and not self.schedule.active:
            return False  # called eight times per order, so the usual case comes first
        known = self._accounts.get(name)
        if known is None:
            return False
        if not known.behaviour.faults.get(point, 0):
            if not self.schedule.fault_hits(name, point):
                return False
            _log.info("exchange.fault", account=name, point=point.value, random=True)
            return True
        _log.info("exchange.fault", account=name, point=point.value)
        if (behaviour := known.behaviour.after_fault(point)) is not known.behaviour:
            self.set_behaviour(name, behaviour)
        return True

    def _account(self, name: str) -> ExchangeAccount:
        try:
            return self._accounts[name]
        except KeyError:
            raise UnknownAccount(f"the exchange has no account {name}") from None

    def _save(self, name: str, account: ExchangeAccount) -> None:
        self._ledger.save_account(
            name, account.key_hash, account.person_id, account.behaviour.model_dump_json()
        )
        self._accounts[name] = account
        self._index_faults(name)

    def _index_faults(self, name: str) -> None:
        if self._accounts[name].behaviour.faults:
            self._faulty.add(name)
        else:
            self._faulty.discard(name)


def _key_hash(account: str, api_key: str, secret_key: str) -> bytes:
    """Hashes the keys: random and long, so a plain hash is enough.
    Length prefixes separate the parts."""
    digest = blake2b(digest_size=32)
    for part in (account, api_key, secret_key):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(4, "big") + data)
    return digest.digest()
