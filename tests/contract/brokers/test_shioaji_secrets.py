"""What the SDK says may quote credentials; nothing of them leaves the adapter."""

from __future__ import annotations

from decimal import Decimal

import pytest

from infra.berth_testing.harness import HeardOrders, order
from tests.support.brokers.shioaji_client import REAL, ShioajiStage, fails
from tests.support.brokers.shioaji_reports import make_order_event, make_trade
from worker_runtime.protocol.errors import BrokerError, BrokerUnreachable, OutcomeUnknown
from worker_runtime.protocol.messages import Credentials

CANARIES = Credentials(
    api_key="CanaryApiKey" * 3,
    secret_key="CanarySecretKey" * 3,
    person_id="A987654321",
    ca_certificate=b"certificate",
    ca_password="Canary(Pass.word",
)
SAID = (
    "x" * 190
    + " refused: "
    + " ".join(
        (CANARIES.secret_key, CANARIES.api_key, CANARIES.person_id.lower(), CANARIES.ca_password)
    )
)


def no_canary(text: str | None) -> bool:
    lowered = (text or "").lower()
    return "canary" not in lowered and "a9876" not in lowered


@pytest.mark.parametrize("where", ["login", "activate_ca", "preload"])
@pytest.mark.parametrize("name", ["AuthError", "ServerError", "SystemMaintenance"])
def test_a_failed_login_reports_only_its_kind_and_status(
    heard: HeardOrders, where: str, name: str
) -> None:
    setting = ShioajiStage(heard, simulation=False)
    setting.client.does[where] = fails(name, f"status 500: reworded canary {SAID}")
    with pytest.raises(BrokerError) as caught:
        setting.login(CANARIES)
    assert str(caught.value.detail) == f"{name} 500"


def test_no_text_of_the_sdk_carries_a_credential_out_of_the_adapter(heard: HeardOrders) -> None:
    setting = ShioajiStage(heard, simulation=False)
    broker = setting.login(CANARIES)
    setting.client.does |= {name: fails("ServerError", SAID) for name in ("place_order", "usage")}
    setting.client.does["list_trades"] = lambda: [
        make_trade(REAL, msg=SAID, account=setting.client.accounts[0])
    ]
    with pytest.raises(OutcomeUnknown) as placing:
        broker.place(order(symbol="2890", price=Decimal(17)), 20.0)
    with pytest.raises(BrokerUnreachable) as asking:
        broker.ping(20.0)
    [listed] = broker.orders(20.0).orders
    event = make_order_event("New", "88")
    event["operation"]["op_msg"] = SAID
    assert setting.client.callback is not None
    setting.client.callback(REAL.OrderState.StockOrder, event)
    [change] = heard.changes
    told = [placing.value.detail, asking.value.detail, listed.reason, change.order.reason]
    assert all(told)
    assert all(no_canary(text) for text in told)
