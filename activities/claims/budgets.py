"""Decides under which names a worker counts its user's calls at the brokers
(`infra/database/budgets.py`).

Three owners of counts are possible: the user as one person, the users whom an operator has
linked for that person, and the user's share of what the egress address may do, by the broker's
record or else by a setting. A name is a keyed hash of its owner.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from infra.database import budgets
from infra.database.budgets import BudgetFacts, SealedPerson
from infra.database.engine import Database
from infra.database.models import StoredCredentials
from infra.vault.key_pairs import OrchestratorKeys
from worker_runtime.protocol.broker_record import CountedPer, Plugin
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.launch import DEFAULT_EGRESS_PERSONS
from worker_runtime.protocol.messages import Credentials

#: Names of one owner or account that a worker takes, the newest (`SealedAccount`).
_MAX_NAMES = 8
#: Smallest share of an address, in persons:
#: with less there is no room for the listing after a login.
MIN_ADDRESS_SHARE = 0.2
#: Seconds for which the number of an address's users is kept.
_COUNT_TTL_S = 60.0


@dataclass(frozen=True)
class AccountBudgets:
    """The budgets of one account."""

    person: SealedPerson
    #: As in `SealedAccount`, the oldest first.
    names: list[str]
    address_names: list[str]
    #: The number of persons' calls that the broker takes from the address, by kind, as its record
    #: says.
    address_persons: dict[str, float]
    #: The names that 0.1.0 would use. An orchestrator of that release may hand them to the worker.
    former_names: list[str]


@dataclass(eq=False, repr=False)
class AssignmentBudgets:
    """The budgets of one assignment, which its worker is allowed to use."""

    user_id: str
    epoch: int
    facts: BudgetFacts
    #: The user's share of the egress address, in persons, where no record says more.
    address_share: float
    #: The number of users that share an address.
    address_users: int = 1
    accounts: dict[str, AccountBudgets] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {
            name
            for account in self.accounts.values()
            for name in (*account.names, *account.address_names, *account.former_names)
        }

    @property
    def persons(self) -> dict[str, SealedPerson]:
        return {account_id: account.person for account_id, account in self.accounts.items()}


@dataclass(eq=False, repr=False)
class BudgetPlanner:
    """Decides who counts where. One instance serves a process."""

    database: Database
    keys: OrchestratorKeys
    #: '': calls are counted by address for brokers only whose record has limits of an address: then
    #: all workers count as one address.
    egress_address: str = ""
    #: The number of persons' limits that the address may use, for the kinds of calls of which the
    #: broker's record does not say how many the address may make.
    egress_persons: int = DEFAULT_EGRESS_PERSONS
    brokers: Mapping[str, Plugin] = field(default_factory=installed_brokers)

    def __post_init__(self) -> None:
        self._address_users = 0
        self._counted_at = 0.0

    async def plan(self, user_id: str, epoch: int, *, reload: bool = False) -> AssignmentBudgets:
        """Reads what is known before anything is decrypted.

        `reload`: the worker has names already.
        """
        async with self.database.session(autocommit=True) as session:
            facts = await budgets.read_budget_facts(session, user_id, epoch, reload=reload)
        users = max(1, await self._count_address_users())
        share = self.egress_persons / users if self.egress_address else math.inf
        return AssignmentBudgets(user_id, epoch, facts, share, users)

    def account(
        self, plan: AssignmentBudgets, stored: StoredCredentials, clear: Credentials
    ) -> AccountBudgets:
        """Returns the budgets of an account, and adds them to the plan."""
        broker = stored.account.broker
        person = _person(stored, clear)
        hashes = self.keys.budget_names("person", broker, *person)
        former = self.keys.former_budget_names(broker, *_former_person(stored, clear))
        names = [*former] if plan.facts.counted_by_person else []
        names += self.keys.budget_names("user", plan.user_id, broker, *person)
        for shared in plan.facts.shared:
            if shared.broker == broker and not set(shared.persons).isdisjoint(hashes):
                names += self.keys.budget_names("linked", broker, str(shared.number))
        address_names: Sequence[str] = ()
        address_persons = self._address_persons(broker)
        if self.egress_address or address_persons:
            address_names = self.keys.budget_names(
                "address", self.egress_address, broker, plan.user_id
            )
        if self.egress_address:
            shared_by_all = self.keys.former_budget_names("address", self.egress_address)
            former += tuple(f"{broker}-{name}" for name in shared_by_all)
        account_budgets = AccountBudgets(
            person=SealedPerson(stored.version, hashes),
            names=names[-_MAX_NAMES:],
            address_names=[*address_names][-_MAX_NAMES:],
            address_persons=address_persons,
            former_names=[*former],
        )
        plan.accounts[stored.account_id] = account_budgets
        return account_budgets

    async def record(self, plan: AssignmentBudgets, *, reload: bool = False) -> list[str] | None:
        """Records what is about to be sent. Returns the names that the worker may use; None if
        release 0.1.0 claimed it and it uses that release's names."""
        return await self.database.write(
            budgets.note_sealed, plan.user_id, plan.epoch, plan.names, plan.persons, reload=reload
        )

    def _address_persons(self, broker: str) -> dict[str, float]:
        """Returns how many persons' calls the broker takes from an address, by kind, as its record
        says."""
        plugin = self.brokers.get(broker)
        if plugin is None:
            return {}
        return plugin.record.limits.address_persons()

    async def _count_address_users(self) -> int:
        """Returns the users who share the address: all who had a worker in the last seven days; 0
        if no address is limited."""
        if not self.egress_address and not any(map(self._address_persons, self.brokers)):
            return 0
        if time.monotonic() - self._counted_at > _COUNT_TTL_S or not self._address_users:
            self._address_users = await self.database.fetch(budgets.count_address_users)
            self._counted_at = time.monotonic()
        return self._address_users


def share_permille(plan: AssignmentBudgets) -> int:
    """Returns the user's share of the address in thousandths of a person, at most what the user's
    persons may do, and at least `MIN_ADDRESS_SHARE`."""
    return _permille(plan, plan.address_share)


def shares_by_kind(plan: AssignmentBudgets, account_id: str) -> dict[str, int]:
    """Returns the same by kind of call, for the kinds of which the record of the account's broker
    says how many it takes from an address."""
    persons = plan.accounts[account_id].address_persons
    return {kind: _permille(plan, number / plan.address_users) for kind, number in persons.items()}


def _permille(plan: AssignmentBudgets, share: float) -> int:
    persons = len({account.person.hashes for account in plan.accounts.values()})
    return int(1000 * max(MIN_ADDRESS_SHARE, min(float(max(persons, 1)), share)))


def _person(stored: StoredCredentials, clear: Credentials) -> tuple[str, str]:
    """Returns the kind and the name of the person whose calls the broker counts together."""
    if clear.person_id:
        return "person", clear.person_id
    plugin = installed_brokers().get(stored.account.broker)
    if plugin is not None and plugin.record.limits.counted_per is CountedPer.ACCOUNT:
        return "account", stored.account.number or stored.account_id
    return "api key", clear.api_key


def _former_person(stored: StoredCredentials, clear: Credentials) -> tuple[str, str]:
    """Returns the person as release 0.1.0 names it, which does not know the broker's own number of
    an account."""
    kind, person = _person(stored, clear)
    return (kind, stored.account_id) if kind == "account" else (kind, person)
