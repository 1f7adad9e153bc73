"""`berth broker check` on the paper exchange, and on Shioaji's stand-in with each fault, which it
finds."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from infra.berth_testing.harness import API_KEY, CREDENTIALS, SECRET_KEY, order, until
from infra.cli import broker as command
from infra.exchange.client import ExchangeServer
from tests.support.brokers.harnesses import PaperStage
from tests.support.brokers.shioaji_client import REAL
from tests.support.brokers.shioaji_market import MarketBehaviour, ShioajiMarketStage
from worker_runtime.brokers.check import BrokerCheck
from worker_runtime.brokers.shioaji import mapping
from worker_runtime.protocol.broker_check import CheckOutcome, CheckRequest, CheckStep
from worker_runtime.protocol.messages import Credentials, Side
from worker_runtime.protocol.order_terms import OrderLot
from worker_runtime.protocol.requests import QuantityMeaning

PASSED, WARNED, FAILED = CheckOutcome.PASSED, CheckOutcome.WARNED, CheckOutcome.FAILED
SKIPPED = CheckOutcome.SKIPPED
ACCOUNT, PERSON = "9800111", "A123456789"
KEYS = Credentials(
    api_key=API_KEY,
    secret_key=SECRET_KEY,
    person_id=PERSON,
    ca_certificate=b"certificate",
    ca_password="CanaryPassword",
)


def request_of(**words: Any) -> CheckRequest:
    given: dict[str, Any] = {
        "broker": "shioaji",
        "broker_type": "stock",
        "simulation": False,
        "account": ACCOUNT,
        "credentials": KEYS,
        "symbol": "2330",
        "price": Decimal(50),
        "patience_s": 0.6,
    }
    return CheckRequest(**{**given, **words})


def check(stage: ShioajiMarketStage, **words: Any) -> dict[str, CheckStep]:
    """Runs the check on a stand-in; its steps by name."""
    stage.register(ACCOUNT, API_KEY, SECRET_KEY)
    reported: list[CheckStep] = []
    request = request_of(broker_type=stage.kind, simulation=stage.simulation, **words)
    steps = BrokerCheck(
        request, lambda on_order: stage.broker(ACCOUNT, on_order), reported.append
    ).run()
    assert steps == reported
    # Each is logged out; after a login that failed, a thread of its own does it.
    until(lambda: not stage.market.sessions)
    assert all(row.status in ("Cancelled", "Failed", "Filled") for row in stage.market.rows) or (
        command.exit_code_of(steps) == command.LEFT_WORKING
    )
    return {step.name: step for step in steps}


def stage_of(kind: str = "stock", simulation: bool = False, **behaviour: Any) -> ShioajiMarketStage:
    return ShioajiMarketStage(
        MarketBehaviour(confirms_after=0.0, **behaviour), kind=kind, simulation=simulation
    )


def forget_refused_tokens() -> None:
    """Logs in once more, since the next login after a refused token asks for a new one, also in
    another test of this process."""
    stage = stage_of()
    stage.register(ACCOUNT, API_KEY, SECRET_KEY)
    broker = stage.broker(ACCOUNT, lambda change: None)
    broker.login(KEYS, 20.0)
    broker.close()


def failed(steps: dict[str, CheckStep]) -> list[str]:
    return [name for name, step in steps.items() if step.outcome is FAILED]


def test_a_healthy_account_passes_every_step() -> None:
    steps = check(stage_of())
    assert failed(steps) == []
    assert [name for name, step in steps.items() if step.outcome is PASSED and name != "clock"] == [
        "login",
        "account",
        "connections",
        "certificate",
        "contract",
        "ping",
        "positions",
        "earlier orders",
        "place and cancel",
        "price",
        "second session",
        "quantity: common",
        "nothing left",
        "list",
        "token",
    ]
    assert command.exit_code_of(list(steps.values())) == 0


@pytest.mark.parametrize("means", QuantityMeaning)
@pytest.mark.parametrize(
    ("kind", "lot", "name"),
    [
        ("stock", OrderLot.COMMON, "Common"),
        ("stock", OrderLot.ODD, "Odd"),
        ("futures", OrderLot.COMMON, "futures"),
    ],
)
def test_it_sees_what_a_quantity_change_means_for_each_kind_of_lot(
    means: QuantityMeaning, kind: str, lot: OrderLot, name: str
) -> None:
    stage = stage_of(kind, quantity_means={name: means})
    steps = check(stage, symbol="TXFA6" if kind == "futures" else "2330", lots=(lot,))
    [seen] = command.seen_meanings(list(steps.values()))
    assert (seen.meaning, seen.lot, seen.futures) == (means, lot, kind == "futures")
    assert (seen.sdk_version, seen.simulation) == (REAL.__version__, False)


@pytest.mark.parametrize(
    ("behaviour", "step", "outcome", "words"),
    [
        (
            {"login_error": REAL.ServerError("StatusCode: 451, Detail: x")},
            "login",
            FAILED,
            "LOGIN_LIMITED",
        ),
        ({"login_error": REAL.SystemMaintenance("503")}, "login", FAILED, "LOGIN_LIMITED"),
        (
            {"login_error": REAL.SystemMaintenance("503 please update the version of shioaji")},
            "login",
            FAILED,
            "BROKER_VERSION_REFUSED",
        ),
        (
            {"login_error": REAL.AuthError("Sign data is timeout")},
            "login",
            FAILED,
            "BROKER_CLOCK_REFUSED",
        ),
        ({"login_error": REAL.AuthError("wrong key")}, "login", FAILED, "LOGIN_REJECTED"),
        ({"unsigned": True}, "login", FAILED, "not signed"),
        ({"other_connections": 4}, "connections", WARNED, "451"),
        ({"cache": ("Degraded", "SequenceGap")}, "ping", WARNED, "SequenceGap"),
        ({"other_contract": {"2330": "4903"}}, "contract", FAILED, "4903"),
        ({"missing": {"2330"}}, "contract", FAILED, "no stock contract"),
        ({"own_orders_only": True}, "second session", FAILED, "second session"),
        ({"ignores_cancels": True}, "nothing left", FAILED, "cancel by hand"),
        ({"is_dead": True}, "ping", FAILED, "BROKER_UNREACHABLE"),
        (
            {"refuses_positions": REAL.ShioajiError("no permission for accounting")},
            "positions",
            FAILED,
            "no permission",
        ),
        ({"ignores_price_changes": True}, "price", FAILED, "did not change its price"),
        ({"ends_at_price_change": True}, "price", FAILED, "is cancelled with 1"),
        ({"hides_price_changes": True}, "price", WARNED, "no event came"),
        ({"keeps_connections": True}, "token", WARNED, "3 connections are counted after it, 2"),
        ({"new_token_ends_others": True}, "token", WARNED, "a new token ends the sessions"),
        (
            {"refuses_renewal": REAL.SystemMaintenance("503 log in again in one minute")},
            "token",
            FAILED,
            "LOGIN_LIMITED",
        ),
    ],
)
def test_it_finds_each_fault(
    behaviour: dict[str, Any], step: str, outcome: CheckOutcome, words: str
) -> None:
    steps = check(stage_of(**behaviour))
    assert steps[step].outcome is outcome, steps
    assert words in steps[step].detail
    forget_refused_tokens()


def test_a_price_is_changed_by_one_step_away_from_the_market() -> None:
    stage = stage_of()
    step = check(stage)["price"]
    assert (step.evidence["from"], step.evidence["to"]) == ("50.0", "49.9")
    assert [event["price"] for event in step.evidence["events"]][-2:] == ["50.0", "49.9"]
    assert [event["kind"] for event in step.evidence["raw_events"]][:2] == ["SORDER", "SORDER"]


def test_a_token_is_renewed_once_and_the_former_session_is_ended() -> None:
    stage = stage_of()
    step = check(stage)["token"]
    assert (step.outcome, stage.market.logins) == (PASSED, [False, False, True])
    assert step.evidence == {
        "former_session_lives": True,
        "connections_before": 1,
        "connections_after": 1,
    }


# --- a check that was killed between an order and its cancel --------------------------------------


def leave_order(
    stage: ShioajiMarketStage, tag: str, side: Side = Side.BUY, price: Decimal = Decimal(50)
) -> None:
    """Places an order and ends the session, as a process does that is killed."""
    stage.register(ACCOUNT, API_KEY, SECRET_KEY)
    broker = stage.broker(ACCOUNT, lambda change: None)
    broker.login(KEYS, 20.0)
    broker.place(msgspec.structs.replace(order(price=price, side=side), tag=tag), 5.0)
    broker.close()
    until(lambda: not stage.market.sessions)


def test_an_order_of_a_check_that_was_killed_is_found_by_its_tag_and_cancelled() -> None:
    stage = stage_of()
    leave_order(stage, "ck12ab")
    steps = check(stage)
    step = steps["earlier orders"]
    assert (step.outcome, "tag ck12ab" in step.detail) == (WARNED, True), step
    assert stage.market.rows[0].status == "Cancelled"
    assert steps["place and cancel"].outcome is PASSED
    assert command.exit_code_of(list(steps.values())) == 0


def test_an_order_of_a_killed_check_that_stays_is_named_and_no_further_one_is_placed() -> None:
    stage = stage_of(ignores_cancels=True)
    leave_order(stage, "ck12ab")
    steps = check(stage)
    assert "tag ck12ab" in steps["earlier orders"].detail
    assert len(stage.market.rows) == 1
    assert command.exit_code_of(list(steps.values())) == command.LEFT_WORKING


def test_without_orders_an_order_of_a_killed_check_is_named_and_not_touched() -> None:
    stage = stage_of()
    leave_order(stage, "ck12ab")
    steps = check(stage, orders=False)
    assert "--orders" in steps["earlier orders"].detail
    assert stage.market.changes[ACCOUNT] == 0
    assert command.exit_code_of(list(steps.values())) == command.LEFT_WORKING


@pytest.mark.parametrize(
    ("tag", "side"),
    [("CK12AB", Side.BUY), ("ck12ag", Side.BUY), ("ck12a", Side.BUY), ("ck12ab", Side.SELL)],
)
def test_an_order_that_no_check_placed_is_never_touched(tag: str, side: Side) -> None:
    stage = stage_of()
    leave_order(stage, tag, side, Decimal(50) if side is Side.BUY else Decimal(150))
    stage.register(ACCOUNT, API_KEY, SECRET_KEY)
    request = request_of(orders=True)
    steps = BrokerCheck(
        request, lambda on_order: stage.broker(ACCOUNT, on_order), lambda step: None
    ).run()
    assert {step.name: step for step in steps}["earlier orders"].outcome is PASSED
    assert [row.status for row in stage.market.rows if row.native.custom_field == tag] == [
        "Submitted"
    ]


def test_a_simulation_that_hides_the_orders_of_others_says_that_it_found_out_nothing() -> None:
    stage = stage_of(simulation=True, own_orders_only=True)
    leave_order(stage, "ck12ab")
    stage.market.rows[0].status = "Cancelled"
    step = check(stage)["earlier orders"]
    assert (step.outcome, "look at the broker" in step.detail) == (SKIPPED, True)


def test_a_check_killed_while_its_order_is_placed_is_cleaned_up_by_the_next_one(
    exchange: ExchangeServer, account: str
) -> None:
    stage = PaperStage(exchange.address, exchange.admin_url)
    stage.register(account, API_KEY, SECRET_KEY)
    stage.set_price("2330", Decimal(100))
    request = request_of(
        broker="paper",
        account=account,
        credentials=CREDENTIALS,
        paper_exchange=exchange.address,
        simulation=True,
        patience_s=10.0,
    )
    stage.silence_next(account)  # the exchange takes the order, and never answers
    with subprocess.Popen(
        [sys.executable, "-m", "worker_runtime.brokers.check"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    ) as killed:
        assert killed.stdin is not None
        killed.stdin.write(msgspec.json.encode(request))
        killed.stdin.close()
        until(lambda: bool(stage.taken(account)))
        killed.kill()
    [remaining] = stage.taken(account)
    assert remaining.state.value == "submitted"
    steps = {step.name: step for step in command.run_check(request)}
    assert failed(steps) == [], steps
    assert (steps["earlier orders"].outcome, remaining.tag in steps["earlier orders"].detail) == (
        WARNED,
        True,
    )
    assert {taken.state.value for taken in stage.taken(account)} == {"cancelled"}


def test_the_exit_code_says_what_came_of_it() -> None:
    def code(**behaviour: Any) -> int:
        return command.exit_code_of(list(check(stage_of(**behaviour)).values()))

    assert code(other_connections=4) == 0  # a warning
    assert code(other_contract={"2330": "4903"}) == command.FAILED
    assert code(login_error=REAL.AuthError("x")) == command.UNDECIDED
    assert code(ignores_cancels=True) == command.LEFT_WORKING


@pytest.mark.parametrize(("days", "outcome"), [(300, PASSED), (20, WARNED)])
def test_it_says_when_the_certificate_expires(days: int, outcome: CheckOutcome) -> None:
    assert check(stage_of(certificate_days=days), orders=False)["certificate"].outcome is outcome


def test_it_finds_a_certificate_that_has_expired() -> None:
    step = check(stage_of(certificate_days=-1))["certificate"]
    assert (step.outcome, "certificate has expired" in step.detail) == (FAILED, True)


def test_a_simulation_confirms_itself_only_and_warns_of_what_it_cannot_show() -> None:
    steps = check(stage_of(simulation=True, own_orders_only=True))
    assert failed(steps) == []
    assert (steps["second session"].outcome, steps["certificate"].outcome) == (WARNED, SKIPPED)
    [seen] = command.seen_meanings(list(steps.values()))
    assert seen.simulation


def test_an_order_of_unknown_outcome_is_looked_for_and_cancelled() -> None:
    stage = stage_of()
    stage.drop_next(ACCOUNT)
    steps = check(stage)
    assert "OUTCOME_UNKNOWN" in steps["place and cancel"].detail
    assert steps["nothing left"].outcome is PASSED, steps["nothing left"]
    assert [row.status for row in stage.market.rows] == ["Cancelled"]
    assert command.exit_code_of(list(steps.values())) == command.FAILED


def test_an_order_that_the_broker_does_not_list_is_named_and_the_exit_code_says_it_may_work() -> (
    None
):
    stage = stage_of(own_orders_only=True)
    stage.drop_next(ACCOUNT)
    steps = check(stage)
    assert "tag ck" in steps["nothing left"].detail, steps
    assert command.exit_code_of(list(steps.values())) == command.LEFT_WORKING


def test_a_price_near_the_market_is_refused_before_anything_is_sent() -> None:
    stage = stage_of(reference=100.0)
    assert "too near" in check(stage, price=Decimal(99))["place and cancel"].detail
    assert stage.market.rows == []
    assert check(stage, price=Decimal(90))["place and cancel"].outcome is PASSED


def test_without_orders_nothing_is_sent() -> None:
    stage = stage_of()
    assert "place and cancel" not in check(stage, orders=False)
    assert stage.market.rows == []


def test_without_a_price_nothing_is_sent() -> None:
    stage = stage_of()
    assert "--price" in check(stage, price=None)["place and cancel"].detail
    assert stage.market.rows == []


def test_what_it_writes_down_names_nobody_and_can_be_read_again(tmp_path: Path) -> None:
    stage = stage_of()
    steps = list(check(stage).values())
    command.write_fixtures(tmp_path, request_of(), steps)
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    for secret in (API_KEY, SECRET_KEY, PERSON, ACCOUNT, "CanaryPassword", "9A95"):
        assert not any(secret in text for text in files.values()), secret
    seen = json.loads(files["shioaji_production_quantity__common.json"])["evidence"]
    order, status = (
        SimpleNamespace(
            **{
                k.removeprefix(f"{part}."): v
                for k, v in seen["after"].items()
                if k.startswith(part)
            }
        )
        for part in ("order", "status")
    )
    order.id, order.custom_field, order.account = "1", "", None
    recorded = SimpleNamespace(contract=SimpleNamespace(code="2330"), order=order, status=status)
    assert mapping.order_of(recorded).quantity == seen["left"] == 2


def test_what_cannot_be_stored_or_written_is_a_sentence_besides_the_report(tmp_path: Path) -> None:
    steps = list(check(stage_of()).values())
    assert command.seen_meanings(steps)
    folder = tmp_path / "a file"
    folder.write_text("")
    nowhere = "postgresql+asyncpg://berth@127.0.0.1:1/berth"
    stored, failures = command.keep_results(
        nowhere, request_of(), steps, fixtures=folder, store=True
    )
    assert not stored
    assert [failure.partition(":")[0] for failure in failures] == [
        "The fixtures were not written",
        "What was confirmed is not stored. Check again",
    ]
    unasked = command.keep_results(nowhere, request_of(), steps, fixtures=None, store=False)
    assert unasked == (False, [])


def test_it_runs_against_the_paper_exchange_in_a_process_of_its_own(
    exchange: ExchangeServer, account: str
) -> None:
    stage = PaperStage(exchange.address, exchange.admin_url)
    stage.register(account, API_KEY, SECRET_KEY)
    stage.set_price("2330", Decimal(100))
    request = request_of(
        broker="paper",
        account=account,
        credentials=CREDENTIALS,
        paper_exchange=exchange.address,
        simulation=True,
        patience_s=10.0,
    )
    shown: list[CheckStep] = []
    steps = {step.name: step for step in command.run_check(request, shown.append)}
    assert list(steps.values()) == shown
    assert failed(steps) == [], steps
    assert steps["second session"].outcome is PASSED
    assert [taken.state.value for taken in stage.taken(account)] == ["cancelled"] * 2


def test_a_file_of_keys_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"api_key": "a", "secret_key": "canary"}))
    path.chmod(0o644)
    with pytest.raises(command.CheckRefused, match="chmod 600"):
        command.read_credentials(path)
    path.chmod(0o600)
    assert command.read_credentials(path).api_key == "a"
    path.write_text('{"secret_key": "canary"')
    with pytest.raises(command.CheckRefused) as caught:
        command.read_credentials(path)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("filled", "outcome", "words"),
    [
        (2, PASSED, "2 of 3 were filled"),
        (0, WARNED, "nothing is learned"),
        (3, WARNED, "ended as filled"),
    ],
)
def test_a_partial_fill_is_tried_and_its_rest_cancelled(
    filled: int, outcome: CheckOutcome, words: str
) -> None:
    stage = stage_of(deals_after=0.0)
    stage.market.behaviour.offered = {"2330": (Decimal(90), filled)}
    steps = check(stage, partial_quantity=3, partial_price=Decimal(90))
    step = steps["partial fill"]
    assert (step.outcome, words in step.detail) == (outcome, True), step
    if outcome is PASSED:
        assert {
            name: step.evidence[name] for name in ("ordered", "filled", "state", "quantity")
        } == {
            "ordered": 3,
            "filled": 2,
            "state": "cancelled",
            "quantity": 3,
        }
        assert step.evidence["after"]["status.cancel_quantity"] == 1


def test_a_partial_fill_that_no_event_reports_is_a_warning() -> None:
    stage = stage_of(loses_deals=True)
    stage.market.behaviour.offered = {"2330": (Decimal(90), 1)}
    step = check(stage, partial_quantity=3, partial_price=Decimal(90))["partial fill"]
    assert (step.outcome, "0 of 1 fills" in step.detail) == (WARNED, True)


@pytest.mark.parametrize("given", ["3", "x@1", "1@10", "3@-1", "3@nan", "@"])
def test_a_partial_fill_that_makes_no_sense_is_refused(given: str) -> None:
    with pytest.raises(command.CheckRefused):
        command.read_partial(given)
    assert command.read_partial("3@15.05") == (3, Decimal("15.05"))


def test_what_is_checked_comes_from_the_records_where_nobody_says_it() -> None:
    assert command.what_to_check(None, None, None) == ("shioaji", "stock", "2890")
    assert command.what_to_check("paper", "futures", "TXFR1") == ("paper", "futures", "TXFR1")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (("nowhere", None, None), "no broker nowhere"),
        (("paper", "bonds", None), "no market bonds; it has stock, futures"),
        (("paper", "futures", None), "--symbol"),
    ],
)
def test_what_no_record_has_is_refused_with_a_sentence(
    asked: tuple[str, str | None, None], sentence: str
) -> None:
    with pytest.raises(command.CheckRefused, match=sentence):
        command.what_to_check(*asked)
