"""The operators' pages in a real Chromium, on the whole system.

`BERTH_SCREENSHOTS=docs/img` also takes the pictures of the documents.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from api.page.rendering import MENU
from infra.client.client import BerthClient
from infra.client.models import OrderTicket
from infra.database.dead_letters import DeadLetter, DeadLetters
from infra.database.engine import Database
from infra.vault.message_secret import MessageSecretFile
from tests.support.systems.local import RunningSystem, Trader, until
from worker_runtime.protocol import keys
from worker_runtime.protocol.authentication import sign_payload
from worker_runtime.protocol.messages import WorkerEvent, WorkerEventKind
from worker_runtime.protocol.worker_reports import EVENT, sign_event

CHROMIUM = shutil.which("chromium")
expect.set_options(timeout=30_000)  # Swagger draws a long document: 2 s on a free machine
PICTURES = os.environ.get("BERTH_SCREENSHOTS")
DESKTOP: Any = {"width": 1100, "height": 700}
#: Colour scheme and window; the first one is as narrow as a phone's.
LOOKS: Any = [("light", {"width": 360, "height": 640}), ("light", DESKTOP), ("dark", DESKTOP)]

#: Of 60 s they take up to 35 where the host gives us half of its CPU.
pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(120),
    pytest.mark.needs("browser"),
]


@pytest.fixture
def trader(system: RunningSystem) -> Trader:
    return system.trader()


@pytest.fixture
def browser(trader: Trader) -> Iterator[Browser]:
    """Starts a browser for each test, after the system's fixtures: its event loop runs in this
    thread until it is closed, and theirs cannot run meanwhile."""
    with sync_playwright() as playwright:
        # Chromium's own sandbox refuses root; all that it loads is ours.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class BrowserUser:
    """Somebody at a browser. What goes wrong in its console, or leaves our server, is noted."""

    def __init__(self, browser: Browser, url: str, key: str, **how: Any) -> None:
        self.url = url
        self.complaints: list[str] = []
        self.context: BrowserContext = browser.new_context(
            base_url=url, **{"viewport": DESKTOP, **how}
        )
        self.page: Page = self.context.new_page()
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._check)
        self.page.goto("/")
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Log in").click()
        self.page.wait_for_url(re.compile(r"(?<!login)$"))

    def _note(self, message: Any) -> None:
        # An answer of 4xx is an act that was refused, which the page itself says.
        if message.type == "error" and "status of 4" not in message.text:
            self.complaints.append(message.text)

    def _check(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.complaints.append(f"{request.url} is not ours")

    def act(self, button: str, reason: str = "") -> None:
        """Presses a button, and answers what it asks."""
        self.page.get_by_role("button", name=button, exact=True).first.click()
        if reason:
            self.page.get_by_label("Reason", exact=True).last.fill(reason)
        if reason or self.page.get_by_role("dialog").is_visible():
            self.page.get_by_role("button", name="Do it").click()
        expect(self.page.get_by_role("status")).to_have_text(re.compile("Done|Taken on"))


@pytest.fixture
def admin(system: RunningSystem, browser: Browser) -> Iterator[BrowserUser]:
    desk = BrowserUser(browser, system.stack.api_url, system.stack.admin_key)
    yield desk
    desk.context.close()
    assert desk.complaints == []


def picture(page: Page, name: str) -> None:
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=name in ("user", "servers"))


def fill(system: RunningSystem, trader: Trader, client_order_id: str, quantity: int = 1) -> None:
    ticket = OrderTicket(account_id=trader.account_id, symbol="2330", side="buy", quantity=quantity)
    market = {"client_order_id": client_order_id, "price_type": "MKT", "time_in_force": "IOC"}
    ticket = msgspec.structs.replace(ticket, **market)
    with BerthClient(system.stack.api_url, trader.api_key) as berth:
        assert berth.place_order(trader.user_id, ticket).state == "filled"


def resting(system: RunningSystem, trader: Trader) -> str:
    """The id of an order that the exchange does not fill."""
    placed = system.order(trader, price_type="LMT", price="1", time_in_force="ROD").json()
    assert placed.get("state") == "submitted", placed
    return str(placed["id"])


def test_an_order_arrives_live_and_a_halted_users_next_one_is_refused(
    system: RunningSystem, trader: Trader, admin: BrowserUser
) -> None:
    page = admin.page
    page.goto(f"/page/users/{trader.user_id}")
    expect(page.get_by_text("No orders.")).to_be_visible()
    page.evaluate("window.unchanged = true")
    fill(system, trader, "live-1")
    row = page.get_by_role("row").filter(has_text="live-1")
    expect(row.locator(".state")).to_have_text("filled")
    expect(page.get_by_label("The worker").or_(page.locator("[data-part=worker]"))).to_contain_text(
        "Active"
    )
    fill(system, trader, "live-2", 2)
    expect(page.get_by_role("row").filter(has_text="live-2")).to_be_visible()
    picture(page, "user")

    admin.act("Halt", "a stray strategy")
    expect(page.locator("[data-part=switches]")).to_contain_text("a stray strategy")
    refused = system.order(trader, "live-3")
    assert (refused.status_code, refused.json()["code"]) == (423, "TRADING_HALTED")
    own = {"scope": "user", "state": "halted", "reason": "a break"}
    assert system.call("PUT", "/v1/switches", trader.api_key, json=own).is_success
    admin.act("Open", "it was found")
    expect(page.get_by_role("status")).to_contain_text("It is not open yet")
    assert system.call(
        "PUT", "/v1/switches", trader.api_key, json=own | {"state": "open"}
    ).is_success
    fill(system, trader, "live-4", 3)
    expect(page.get_by_role("row").filter(has_text="live-4")).to_be_visible()
    assert page.evaluate("window.unchanged")  # it was never loaded as a whole
    page.goto("/")
    expect(page.get_by_role("row").filter(has_text=trader.user_id)).to_contain_text("Active")
    picture(page, "fleet")


def test_an_account_shows_why_it_cannot_log_in_until_a_person_asks_for_a_retry(
    system: RunningSystem, trader: Trader, admin: BrowserUser
) -> None:
    def at_the_exchange(key: str) -> None:  # in a thread: the browser's event loop runs in this one
        names = trader.account_id, key, "secret", trader.user_id
        system.threads.submit(system.exchange, lambda exchange: exchange.register(*names)).result(
            10
        )

    at_the_exchange("another")
    assert system.order(trader).json()["code"] == "LOGIN_REJECTED"
    page = admin.page
    page.goto(f"/page/users/{trader.user_id}")
    account = page.get_by_role("listitem").filter(has_text=f"{trader.account_id}: paper")
    expect(account.locator(".state")).to_have_text("rejected")
    expect(account).to_contain_text("LOGIN_REJECTED: ")
    at_the_exchange("key")
    admin.act("Retry")
    expect(account.locator(".state")).to_have_text("idle")
    fill(system, trader, "after-retry")
    page.reload()
    expect(account.locator(".state")).to_have_text("connected")
    expect(account.get_by_role("button", name="Retry")).to_have_count(0)


def test_a_person_ends_an_order_by_hand_with_a_reason(
    system: RunningSystem, trader: Trader, admin: BrowserUser
) -> None:
    page = admin.page
    order_id = resting(system, trader)
    page.goto(f"/page/orders/{order_id}")
    form = page.get_by_role("region", name="End it by hand")
    form.get_by_role("button", name="Resolve").click()
    # No reason.
    assert system.call("GET", f"/v1/orders/{order_id}", trader.api_key).json()["final"] is False
    form.get_by_label("It was").select_option("filled")
    form.get_by_label("How it is known").fill("seen in the broker's app")
    form.get_by_role("button", name="Resolve").click()
    expect(page.get_by_role("status")).to_contain_text("lots")  # filled needs them
    form.get_by_label("It was").select_option("cancelled")
    form.get_by_role("button", name="Resolve").click()
    expect(page.get_by_role("status")).to_have_text("Done.")
    expect(page.locator("[data-part=order] .state")).to_have_text("cancelled")
    view = system.call("GET", f"/v1/orders/{order_id}", trader.api_key).json()
    assert (view["state"], view["final"]) == ("cancelled", True)
    page.goto("/page/audit?action=order.resolved")
    expect(page.get_by_role("row").filter(has_text="seen in the broker's app")).to_be_visible()


@pytest.fixture
def letters(system: RunningSystem, trader: Trader) -> dict[str, str]:
    """Ids of what failed for good: an event that nobody can read, and one that the recorder gave
    up."""
    settings = system.stack.settings
    news = WorkerEvent(
        user_id=trader.user_id,
        worker_id="w-gone",
        epoch=1,
        sequence=1,
        kind=WorkerEventKind.CONNECTED,
        at_ms=1_795_410_000_000,
    )
    own = MessageSecretFile(settings.message_key_file).assignment_keys(news.user_id, 1)
    given_up = DeadLetter(
        kind="recorder", subject="m-1", reason="a bug of before", message=sign_event(news, own)
    )

    async def put() -> None:
        database = Database(settings.database_url, pool_size=1)
        await DeadLetters(database).put([given_up])
        await database.close()

    asyncio.run(put())
    with system.valkey() as client:
        nonsense = msgspec.json.encode({"user_id": news.user_id, "epoch": 1, "sequence": "none"})
        client.xadd(keys.EVENTS, {EVENT: sign_payload(own, b"event/1", nonsense)})

    params = {"kind": "event", "user_id": trader.user_id}

    def unread() -> str | None:
        listing = system.call(
            "GET", "/v1/dead-letters", system.stack.admin_key, params=params
        ).json()
        return next((letter["id"] for letter in listing["letters"]), None)

    return {"given up": str(given_up.id), "unread": until(unread, "the dead letter of an event")}


def test_a_dead_letter_is_redriven_and_another_one_dismissed_with_a_reason(
    system: RunningSystem, letters: dict[str, str], admin: BrowserUser
) -> None:
    page = admin.page
    page.goto("/page/dead-letters")
    rows = {
        name: page.locator("tr", has=page.locator(f"form[data-act*='{letter_id}']"))
        for name, letter_id in letters.items()
    }

    def press(name: str, button: str, reason: str) -> None:
        rows[name].get_by_role("button", name=button).click()
        page.get_by_label("Reason", exact=True).fill(reason)
        page.get_by_role("button", name="Do it").click()

    press("given up", "Redrive", "the bug is gone")
    expect(page.get_by_role("status")).to_have_text("Done.")
    expect(rows["given up"]).to_have_count(0)
    press("unread", "Redrive", "a try")
    expect(page.get_by_role("status")).to_contain_text("cannot be read")  # it is refused, and stays
    expect(rows["unread"]).to_have_count(1)
    rows["unread"].get_by_role("button", name="Dismiss").click()
    page.get_by_role("button", name="Do it").click()  # without a reason: the browser asks for one
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_label("Reason", exact=True).fill("noise of a test")
    page.get_by_role("button", name="Do it").click()
    expect(page.get_by_role("status")).to_have_text("Done.")
    expect(rows["unread"]).to_have_count(0)
    for name, letter_id in letters.items():
        view = system.call("GET", f"/v1/dead-letters/{letter_id}", system.stack.admin_key).json()
        assert view["closed_at"], name
    page.goto("/page/audit?action=dead_letter.dismiss")
    expect(page.get_by_role("row").filter(has_text="noise of a test")).to_be_visible()


def test_a_revoked_key_is_logged_out_at_once(
    system: RunningSystem, admin: BrowserUser, browser: Browser
) -> None:
    body = {"role": "operator", "label": "Erika's laptop"}
    made = system.call("POST", "/v1/api-keys", system.stack.admin_key, json=body).json()
    erika = BrowserUser(browser, system.stack.api_url, made["api_key"])
    # For administrators.
    expect(erika.page.get_by_role("navigation")).not_to_contain_text("API keys")
    admin.page.goto("/page/keys")
    row = admin.page.get_by_role("row").filter(has_text="Erika's laptop")
    row.get_by_role("button", name="Revoke").click()
    admin.page.get_by_label("Reason", exact=True).fill("it was lost")
    admin.page.get_by_role("button", name="Do it").click()
    expect(row).to_have_count(0)
    # The stream of her page ends, it comes back, and is sent to the log-in.
    expect(erika.page.get_by_label("API key")).to_be_visible()
    erika.context.close()


def test_log_out_leads_to_the_log_in_and_nowhere_back(admin: BrowserUser) -> None:
    admin.page.get_by_role("button", name="Log out").click()
    expect(admin.page.get_by_label("API key")).to_be_visible()
    admin.page.goto("/page/keys")
    expect(admin.page.get_by_label("API key")).to_be_visible()


def test_a_user_is_disabled_and_enabled_again(
    system: RunningSystem, trader: Trader, admin: BrowserUser
) -> None:
    page = admin.page
    page.goto(f"/page/users/{trader.user_id}")
    admin.act("Disable", "left the firm")
    expect(page.get_by_text("This user is disabled since")).to_be_visible()
    refused = system.order(trader)
    assert (refused.status_code, refused.json()["code"]) == (403, "USER_DISABLED")
    admin.act("Enable", "came back")
    expect(page.get_by_text("This user is disabled since")).to_have_count(0)
    fill(system, trader, "back-1")


def test_a_user_is_halted_by_keyboard_alone(
    system: RunningSystem, trader: Trader, admin: BrowserUser
) -> None:
    page = admin.page
    page.goto(f"/page/users/{trader.user_id}")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(10):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Halt":
            break
    page.keyboard.press("Enter")
    page.keyboard.type("by keyboard")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_have_text("Done.")
    expect(page.locator("[data-part=switches]")).to_contain_text("by keyboard")
    page.keyboard.press("Enter")  # the button has the focus again
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()


def test_a_page_that_cannot_be_loaded_anew_says_since_when_until_it_can(
    system: RunningSystem, browser: Browser
) -> None:
    desk = BrowserUser(browser, system.stack.api_url, system.stack.admin_key)
    page = desk.page
    page.goto("/page/servers")
    stale = page.locator("#stale")
    failures: list[Callable[[Route], None]] = [
        lambda call: call.fulfill(status=503),
        lambda call: call.abort(),
    ]
    for fail in failures:
        expect(stale).to_be_hidden(timeout=15_000)
        page.route("**/page/servers", fail)
        expect(stale).to_have_text(re.compile(r"Not up to date since \d\d:\d\d\."), timeout=15_000)
        page.unroute("**/page/servers")
    expect(stale).to_be_hidden(timeout=15_000)
    desk.context.close()


def test_every_server_is_up_on_its_page_and_leads_to_temporal(
    system: RunningSystem, admin: BrowserUser
) -> None:
    page = admin.page
    page.goto("/page/servers")
    admin.act("Run maintenance now", "a look at the launcher")
    rows = page.locator("[data-part=servers] tbody tr")
    for name in ("postgresql", "valkey", "temporal", "launcher", "paper exchange"):
        expect(rows.filter(has_text=name).locator(".state").first).to_have_text("up")
    # One at least: Temporal lists those that an earlier test ended for five minutes.
    expect(rows.filter(has_text="orchestrator").get_by_text("up", exact=True).first).to_be_visible()
    expect(rows.filter(has_text="no orchestrator")).to_have_count(0)
    passes = page.locator("[data-part=schedules] tr").filter(has_text="maintenance")
    ui = f"{system.stack.settings.temporal_ui_url}/namespaces/default"
    began = re.compile(re.escape(f"{ui}/workflows/maintenance-"))
    expect(passes.get_by_role("link").first).to_have_attribute(
        "href", f"{ui}/schedules/maintenance"
    )
    expect(passes.get_by_role("link").nth(1)).to_have_attribute("href", began)
    picture(page, "servers")


@pytest.mark.timeout(300)
def test_every_page_is_accessible_and_fits(
    system: RunningSystem, trader: Trader, browser: Browser
) -> None:
    order_id = resting(system, trader)
    desk = BrowserUser(browser, system.stack.api_url, system.stack.admin_key)
    for path in (
        *(item[0] for item in MENU),
        f"/page/users/{trader.user_id}",
        f"/page/orders/{order_id}",
    ):
        assert_accessible(desk.page, path)
    desk.page.context.clear_cookies()
    assert_accessible(desk.page, "/page/login")
    desk.context.close()
    assert desk.complaints == []


def assert_accessible(page: Page, path: str) -> None:
    """In each of the looks, in which nothing is cut off."""
    page.goto(path)
    for scheme, size in LOOKS:
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size(size)
        axe_violations = Axe().run(page).response["violations"]
        assert [
            axe_violation
            for axe_violation in axe_violations
            if axe_violation["impact"] in ("serious", "critical")
        ] == [], (
            path,
            scheme,
            size,
        )
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            path,
            scheme,
            size,
        )
    if path == "/page/pools":
        picture(page, "pool")


def test_the_apis_own_page_needs_no_internet(admin: BrowserUser) -> None:
    admin.page.goto("/v1/docs")
    expect(admin.page.get_by_text("Place an order", exact=True)).to_be_visible()
    admin.page.get_by_text("List switches", exact=True).click()
    admin.page.get_by_role("button", name="Try it out").click()
    admin.page.get_by_role("button", name="Execute").click()
    expect(admin.page.locator(".live-responses-table .response-col_status").last).to_contain_text(
        "200"
    )
