"""SMS, WhatsApp messages and pushes, sent to servers on this machine that answer as the providers
do."""

import functools
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from urllib.parse import parse_qs

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.support.receivers import providers
from tests.support.receivers.providers import Answer, FcmServer, TwilioServer, serving
from worker_runtime.jobs.config import MessagingOutlet, PushOutlet
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol.catalog import MessageReceipt, SendPush, SendSms, SendWhatsapp
from worker_runtime.jobs.protocol.messages import JobOutcomeUnknown
from worker_runtime.jobs.types.job_type import JobContext, JobType
from worker_runtime.jobs.types.message import (
    MessageDeferred,
    MessageRefused,
    ProviderLoginRefused,
    message_job,
)
from worker_runtime.jobs.types.push import FcmProvider
from worker_runtime.jobs.types.twilio import SmsProvider, WhatsappProvider
from worker_runtime.protocol.errors import MalformedMessage

SMS = SendSms(to="+886912345678", text="2330 filled: 1 at 1,000 & more")
PUSH = SendPush(token="phone-1", title="Filled", text="2330", data={"order": "o-1"})


@functools.cache
def key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.fixture
def twilio() -> Iterator[TwilioServer]:
    server = TwilioServer()
    with serving(server):
        yield server


@pytest.fixture
def fcm() -> Iterator[FcmServer]:
    server = FcmServer(key().public_key())
    with serving(server):
        yield server


def messaging(url: str, **fields: str) -> MessagingOutlet:
    values = {
        "account": providers.ACCOUNT,
        "token": providers.TOKEN,
        "sms_sender": "+15005550006",
        **fields,
    }
    return MessagingOutlet(
        url=url, allow_private=True, timeout=2.0, whatsapp_sender="+14155238886", **values
    )


def push(url: str, private_key: str = "") -> JobType:
    pem = key().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    outlet = PushOutlet(
        url=url,
        project_id=providers.PROJECT,
        client_email=providers.ROBOT,
        private_key=private_key or pem,
        token_uri=f"{url}/token",
        allow_private=True,
        timeout=2.0,
    )
    return message_job(FcmProvider(outlet))


def send(job: JobType, message: msgspec.Struct, attempt: int = 1) -> MessageReceipt:
    receipt = job.run(message, JobContext("job-7", attempt, 9, lambda _value: None))
    assert isinstance(receipt, MessageReceipt)
    return receipt


def sms(server: TwilioServer, **fields: str) -> JobType:
    return message_job(SmsProvider(messaging(server.url, **fields)))


def test_an_sms_goes_out_as_twilio_wants_it(twilio: TwilioServer) -> None:
    assert send(sms(twilio), SMS).message_id == f"SM{1:032x}"
    [(_, headers, body)] = twilio.got
    assert headers["Content-Type"] == "application/x-www-form-urlencoded"
    form = {"To": [SMS.to], "From": ["+15005550006"], "Body": [SMS.text]}
    assert parse_qs(body.decode()) == form
    send(sms(twilio, sms_sender="MG0123"), SMS)
    del form["From"]
    assert parse_qs(twilio.got[1][2].decode()) == {**form, "MessagingServiceSid": ["MG0123"]}


def test_a_message_that_went_out_is_done_whatever_id_the_provider_gives_it(
    twilio: TwilioServer,
) -> None:
    twilio.faults = [(201, {}, {"sid": "S" * 65_520}), (201, {}, {"sid": [1] * 20_000})]
    for _ in range(2):
        assert len(send(sms(twilio), SMS).message_id) == 200


def test_a_whatsapp_message_is_free_text_or_a_template(twilio: TwilioServer) -> None:
    job = message_job(WhatsappProvider(messaging(twilio.url)))
    template = "HX" + "a" * 32
    send(job, SendWhatsapp(to=SMS.to, text="hello"))
    send(job, SendWhatsapp(to=SMS.to, template=template, variables={"1": "2330"}))
    first, second = (parse_qs(body.decode()) for _, _, body in twilio.got)
    ends = {"To": [f"whatsapp:{SMS.to}"], "From": ["whatsapp:+14155238886"]}
    assert first == {**ends, "Body": ["hello"]}
    assert second == {**ends, "ContentSid": [template], "ContentVariables": ['{"1":"2330"}']}
    with pytest.raises(MessageRefused, match="status 400 63016"):
        send(job, SendWhatsapp(to=SMS.to, text="too late"))
    bads: list[dict[str, str]] = [{}, {"text": "a", "template": template}]
    for bad in bads:
        with pytest.raises(ValueError, match="either text or template"):
            SendWhatsapp(to=SMS.to, **bad)  # type: ignore[arg-type]


def test_a_push_goes_out_with_one_login_for_many(fcm: FcmServer) -> None:
    job = push(fcm.url)
    receipts = {send(job, PUSH).message_id for _ in range(3)}
    assert (fcm.logins, len(receipts)) == (1, 3)
    message = json.loads(fcm.got[1][2])["message"]
    assert (message["token"], message["data"]) == ("phone-1", {"order": "o-1"})
    assert message["notification"] == {"title": "Filled", "body": "2330"}
    # A repeat of the job replaces what the device shows.
    tags = {
        json.loads(body)["message"]["apns"]["headers"]["apns-collapse-id"]
        for _, _, body in fcm.got[1:]
    }
    assert tags == {message["android"]["notification"]["tag"]}


@pytest.mark.parametrize(
    ("token", "said"),
    [("gone", "status 404 UNREGISTERED"), ("of another project", "status 403 SENDER_ID_MISMATCH")],
)
def test_a_token_that_fcm_does_not_know_is_final(fcm: FcmServer, token: str, said: str) -> None:
    with pytest.raises(MessageRefused) as caught:
        send(push(fcm.url), msgspec.structs.replace(PUSH, token=token))
    assert (caught.value.detail, caught.value.retryable) == (said, False)


def test_a_number_that_is_none_is_final_and_not_quoted(twilio: TwilioServer) -> None:
    with pytest.raises(MessageRefused) as caught:
        send(sms(twilio), SendSms(to="+886912340000", text="hello"))
    assert caught.value.detail == "status 400 21211"


@pytest.mark.parametrize(
    ("headers", "attempt", "min_s", "max_s"),
    [
        ({"Retry-After": "17"}, 1, 17, 17),
        ({"Retry-After": "half an hour from now"}, 1, 1500, 1800),
        ({"Retry-After": "864000"}, 1, 120, 120),
        ({"Retry-After": "garbage"}, 2, 240, 240),
        ({}, 1, 120, 120),
        ({}, 3, 480, 480),
        ({}, 10, 3600, 3600),
    ],
    ids=["seconds", "date", "days", "garbage", "none", "third-attempt", "tenth-attempt"],
)
@pytest.mark.parametrize("status", [429, 503])
def test_too_many_messages_wait_as_long_as_the_provider_says(
    twilio: TwilioServer,
    status: int,
    headers: dict[str, str],
    attempt: int,
    min_s: float,
    max_s: float,
) -> None:
    """Without a word of it each pause is twice the one before, up to an hour."""
    later = format_datetime(datetime.now(UTC) + timedelta(minutes=30), usegmt=True)
    headers = {name: text.replace("half an hour from now", later) for name, text in headers.items()}
    twilio.faults = [
        (status, headers, {"code": 20429, "message": "Too Many Requests", "status": status})
    ]
    with pytest.raises(MessageDeferred, match="20429") as caught:
        send(sms(twilio), SMS, attempt)
    assert caught.value.retryable
    assert caught.value.retry_after is not None
    assert min_s <= caught.value.retry_after <= max_s


FAULTS: list[Answer | None] = [(500, {}, b"<html>"), (502, {}, b""), (504, {}, b"[1]"), None]


@pytest.mark.parametrize("fault", FAULTS, ids=["500", "502", "504", "cut"])
def test_a_message_that_may_have_gone_out_is_not_sent_again_unless_a_repeat_does_no_harm(
    twilio: TwilioServer, fcm: FcmServer, fault: Answer | None
) -> None:
    twilio.faults = [fault]
    with pytest.raises(JobOutcomeUnknown) as unknown:
        send(sms(twilio), SMS)
    assert not unknown.value.retryable
    job = push(fcm.url)
    send(job, PUSH)
    fcm.faults = [fault]
    with pytest.raises(MessageDeferred) as deferred:
        send(job, PUSH)
    assert deferred.value.retryable


def test_a_provider_that_does_not_answer_is_asked_again_only_if_it_got_no_message() -> None:
    server = TwilioServer()
    server.server_close()
    with pytest.raises(MessageDeferred, match="ConnectionRefusedError"):
        send(sms(server), SMS)


def test_a_login_that_is_refused_waits_for_a_person(twilio: TwilioServer, fcm: FcmServer) -> None:
    with pytest.raises(ProviderLoginRefused, match="status 401 20003") as caught:
        send(sms(twilio, token="wrong"), SMS)
    assert caught.value.retryable
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    with pytest.raises(ProviderLoginRefused, match="the login: status 400"):
        send(push(fcm.url, pem), PUSH)
    with pytest.raises(ProviderLoginRefused, match="no RSA key") as caught:
        send(push(fcm.url, "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n"), PUSH)
    assert "c2VjcmV0" not in str(caught.value)
    fcm.faults = [(503, {"Retry-After": "9"}, b"")]
    with pytest.raises(MessageDeferred, match="the login: status 503") as deferred:
        send(push(fcm.url), PUSH)
    assert deferred.value.retry_after == 9.0
    assert not [path for path, _, _ in fcm.got if path != "/token"]


@pytest.mark.parametrize(
    "body", [b"", b"null", b"\xff", b'{"error": 7}', b'{"error": {"details": 3}}', b"[" * 9999]
)
def test_an_answer_that_makes_no_sense_is_still_judged_by_its_status(
    fcm: FcmServer, body: bytes
) -> None:
    job = push(fcm.url)
    send(job, PUSH)
    fcm.faults = [(200, {}, body), (400, {}, body)]
    assert send(job, PUSH).message_id == ""
    with pytest.raises(MessageRefused, match=r"status 400$"):
        send(job, PUSH)


def test_without_a_sender_nothing_is_sent(twilio: TwilioServer) -> None:
    with pytest.raises(MessageRefused, match="BERTH_MESSAGING_SMS_SENDER"):
        send(sms(twilio, sms_sender=""), SMS)
    assert twilio.got == []


@pytest.mark.parametrize(
    "to", ["0912345678", "+0912345678", "+8869", "+886912345678\n", "+88691234567890123", ""]
)
def test_a_text_that_is_not_a_phone_number_is_refused_by_the_producer(to: str) -> None:
    with pytest.raises(MalformedMessage):
        catalog.make_job("j", SendSms(to=to, text="hello"))


def test_what_an_outlet_holds_is_not_in_its_text(twilio: TwilioServer) -> None:
    assert providers.TOKEN not in repr(messaging(twilio.url))
