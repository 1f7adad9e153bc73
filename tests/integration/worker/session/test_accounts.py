"""Several accounts of one user: each logs in on its own, and one that cannot stops no other."""

import time
from typing import Any

from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from worker_runtime.protocol.bounds import MAX_ACCOUNTS
from worker_runtime.protocol.messages import Answer, WorkerEvent

QUICK: dict[str, Any] = {"health_period": 0.2, "login_pause": 0.2}


def told(harness: WorkerHarness) -> dict[str, str]:
    """What is wrong with each account, as the worker told it last."""
    events = [
        event for event in harness.events() if isinstance(event, WorkerEvent) and event.logins
    ]
    return {login.account_id: login.code for login in events[-1].logins} if events else {}


def code_of(answer: Answer) -> str:
    return "" if answer.failure is None else answer.failure.code


def test_one_that_is_rejected_and_one_that_is_away_leave_the_third_active(
    harness: WorkerHarness,
) -> None:
    worker = harness.ready(mark_period=0.2, **QUICK)
    reply = harness.claim(worker, accounts={"good": "good", "bad": "wrong", "away": "closed"})
    assert reply.failure is None
    assert {login.account_id: (login.code, login.rejected) for login in reply.logins} == {
        "good": ("", 0),
        "bad": ("LOGIN_REJECTED", 1),
        "away": ("BROKER_UNREACHABLE", 0),
    }
    assert harness.send(account_id="good").failure is None
    began = time.monotonic()
    assert code_of(harness.send(account_id="bad")) == "LOGIN_REJECTED"
    assert code_of(harness.send(account_id="away")) == "BROKER_UNREACHABLE"
    assert time.monotonic() - began < 2.0  # at once: an order may wait for 30 s
    assert worker.placed() == worker.placed()[:1]
    eventually(lambda: harness.metadata()["state"] == "Active", "the worker is Active")
    assert harness.metadata()["connected"] == "1/3"
    worker.tell_broker("open")
    eventually(
        lambda: told(harness) == {"good": "", "bad": "LOGIN_REJECTED", "away": ""},
        "the third is back",
    )
    assert harness.send(account_id="away").failure is None
    assert [login["api_key"] for login in worker.ledger("login")].count("wrong") == 1


def test_new_credentials_revive_a_rejected_account_and_close_nothing(
    harness: WorkerHarness,
) -> None:
    worker = harness.ready(**QUICK)
    assert harness.claim(worker, accounts={"good": "good", "bad": "wrong"}).failure is None
    reply = harness.reload(worker, "reload-1", bad=("wrong", 2))
    assert code_of_reply(reply.failure) == "LOGIN_REJECTED"
    assert {login.account_id: login.rejected for login in reply.logins} == {"good": 0, "bad": 2}
    reply = harness.reload(worker, "reload-2", bad=("right", 3))
    assert reply.failure is None
    assert {login.account_id: (login.code, login.rejected) for login in reply.logins} == {
        "good": ("", 0),
        "bad": ("", 0),
    }
    assert harness.send(account_id="bad").failure is None
    closed = [entry["account_id"] for entry in worker.ledger("close")]
    assert "good" not in closed


def code_of_reply(failure: Any) -> str:
    return "" if failure is None else str(failure.code)


def test_an_account_that_hangs_at_login_delays_no_order_of_another(harness: WorkerHarness) -> None:
    worker = harness.ready(**QUICK)
    began = time.monotonic()
    assert harness.claim(worker, accounts={"good": "good", "stuck": "hang-3"}).failure is None
    assert harness.send(account_id="good").failure is None
    assert time.monotonic() - began < 2.0
    eventually(lambda: told(harness).get("stuck") == "", "it connects in the end")
    assert harness.send(account_id="stuck").failure is None


def test_a_login_under_way_with_older_credentials_is_closed_when_it_succeeds(
    harness: WorkerHarness,
) -> None:
    worker = harness.ready(**QUICK)
    assert harness.claim(worker, accounts={"good": "good", "slow": "hang-2"}).failure is None
    assert harness.reload(worker, "reload-1", slow=("right", 2)).failure is None
    assert harness.send(account_id="slow").failure is None
    eventually(
        lambda: [entry["account_id"] for entry in worker.ledger("close")] == ["slow"],
        "the older is closed",
    )
    assert harness.send(account_id="slow").failure is None


def test_as_many_accounts_as_a_user_may_have_connect_abreast(harness: WorkerHarness) -> None:
    worker = harness.ready(**QUICK)
    accounts = {f"a{number}": "hang-0.5" for number in range(MAX_ACCOUNTS)}
    began = time.monotonic()
    reply = harness.claim(worker, accounts=accounts)
    took = time.monotonic() - began
    assert reply.failure is None
    eventually(lambda: told(harness) == dict.fromkeys(accounts, ""), "all are connected")
    assert took < 5.0  # one after the other they take 16 s
    assert len(worker.ledger("login")) == MAX_ACCOUNTS


def test_accounts_of_one_person_stay_within_its_connections(harness: WorkerHarness) -> None:
    harness.person = "A123456789"
    worker = harness.ready(**QUICK)
    reply = harness.claim(worker, accounts={f"a{number}": "good" for number in range(7)})
    assert reply.failure is None
    codes = [login.code for login in reply.logins]
    assert (codes.count(""), codes.count("LOGIN_LIMITED")) == (5, 2)
    assert len(worker.ledger("login")) == 5


def test_a_worker_that_ends_while_an_account_hangs_at_login_ends_in_time(
    harness: WorkerHarness,
) -> None:
    worker = harness.ready(**QUICK)
    assert harness.claim(worker, accounts={"good": "good", "stuck": "hang-20"}).failure is None
    began = time.monotonic()
    assert code_of(harness.send(account_id="stuck")) == "BROKER_UNREACHABLE"
    # A login that began now may end soon, but no later order waits.
    assert 3.0 < time.monotonic() - began < 8.0
    began = time.monotonic()
    assert code_of(harness.send(account_id="stuck")) == "BROKER_UNREACHABLE"
    assert harness.send(account_id="good").failure is None
    assert time.monotonic() - began < 2.0
    began = time.monotonic()
    worker.process.terminate()
    assert worker.wait() == 0
    assert time.monotonic() - began < 6.0
    assert [entry["account_id"] for entry in worker.ledger("close")] == ["good"]


def test_live_and_simulation_of_one_number_are_two_connections(harness: WorkerHarness) -> None:
    worker = harness.ready(**QUICK)
    harness.numbers = {"live": ("9A95", False), "paper": ("9A95", True)}
    assert harness.claim(worker, accounts={"live": "one", "paper": "two"}).failure is None
    eventually(lambda: told(harness) == {"live": "", "paper": ""}, "both are connected")
    first, second = harness.order(account_id="live"), harness.order(account_id="paper")
    for order in (first, second):
        harness.enqueue(order)
        assert harness.answer(order.request_id).failure is None
    placed = {entry["order_id"]: entry["key"] for entry in worker.ledger("place")}
    assert placed == {
        first.order_id: ["scripted", "stock", False, "live", "9A95"],
        second.order_id: ["scripted", "stock", True, "paper", "9A95"],
    }
