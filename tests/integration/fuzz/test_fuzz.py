"""No message stops a loop: absurd ones of each type, through the loops' own handlers and real
servers.

A short form runs with the suite. `BERTH_FUZZ_EXAMPLES=2000` is the long one, about ten minutes.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID, uuid4

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from temporalio.client import Client

from activities.claims import claim
from activities.claims.handshake import ClaimReplies
from activities.events.recorder import Recorder
from activities.events.relay import Relay
from activities.events.stream import GROUPS, RECORDER_GROUP, EventHandler, EventStream
from api.orders.outcomes import NotedOutcome, OutcomeWriter
from infra.database.dead_letters import DeadLetters
from infra.database.orders import recording
from infra.database.orders.merging import outcome_of
from infra.local.servers import TemporalServer
from infra.valkey.client import reply_of
from tests.integration.activities.conftest import harness
from tests.support import absurd_messages
from tests.support.activities.event_streams import accept_new_order, make_order_event
from tests.support.activities.harness import ActivityHarness
from tests.support.fuzzing import EXAMPLES, fuzz_settings, fuzz_timeout
from tests.support.message_signing import SECRETS
from tests.support.workers.pool_worker import POOL
from worker_runtime.jobs.protocol.calls import reply_number, reply_progress
from worker_runtime.protocol import keys, sealing
from worker_runtime.protocol.answers import SERVICE, read_answer
from worker_runtime.protocol.authentication import sign
from worker_runtime.protocol.errors import MalformedMessage
from worker_runtime.protocol.messages import (
    Answer,
    ClaimReply,
    Event,
    InboxMessage,
    OrderOutcome,
    OrderState,
    Signed,
    decode,
    encode,
)
from worker_runtime.protocol.requests import ControlMessage, Request, parse_frame, switch_of
from worker_runtime.protocol.worker_reports import EVENT, read_metadata, read_sender
from workflows.user_worker.messages import WorkerRef

__all__ = ["harness"]  # a fixture

#: Ids of users and orders, which each test replaces by real ones.
USER, ORDER = "the user", "the order"


KNOWN = absurd_messages.plausible(
    user_id=[USER],
    order_id=[ORDER],
    event_id=[f"{ORDER}:1", f"{ORDER}:2"],
    worker_id=["w1"],
    claim_id=["c1"],
)
events = st.lists(absurd_messages.messages(Event, KNOWN), min_size=5, max_size=40)
replies = st.lists(absurd_messages.messages(ClaimReply, KNOWN), min_size=1, max_size=10)
answers = st.lists(absurd_messages.messages(Answer, KNOWN), min_size=1, max_size=20)


def about(message: Any, user: str, order: str) -> bytes:
    text = absurd_messages.encoded(message).replace(USER.encode(), user.encode())
    return text.replace(ORDER.encode(), order.encode())


async def send(harness: ActivityHarness, payload: bytes) -> None:
    sender = read_sender(payload)
    mac = sign(harness.secrets.assignment_keys(sender.user_id, sender.epoch), b"event/1", payload)
    for stream in GROUPS.values():
        await reply_of(harness.client.xadd(stream, {EVENT: f"{mac} ".encode() + payload}))


@fuzz_settings
@fuzz_timeout
@given(made=events)
async def test_no_event_stops_recorder_or_relay(
    harness: ActivityHarness, temporal_server: TemporalServer, made: list[Any]
) -> None:
    await harness.client.flushall()
    temporal = await Client.connect(temporal_server.address)
    order_id = await accept_new_order(harness)
    async with harness.database.session() as session:
        user = (await recording.get_order(session, UUID(order_id))).user_id
    for message in made:
        await send(harness, about(message, user, order_id))
    last = msgspec.structs.replace(make_order_event(order_id, 9, OrderState.REJECTED), user_id=user)
    await send(harness, encode(last))
    handlers: dict[str, EventHandler] = {RECORDER_GROUP: Recorder(harness.database)}
    for group, name in GROUPS.items():
        await reply_of(harness.client.xgroup_create(name, group, id="0", mkstream=True))
        handler = handlers.get(group) or Relay(temporal)
        stream = EventStream(
            harness.client,
            group,
            handler,
            harness.secrets,
            dead_letters=DeadLetters(harness.database),
        )
        # Whatever this raises would come again for ever: no server is away.
        assert await asyncio.wait_for(stream.step(), 30) == len(made) + 1
        await stream.upkeep()
        assert (await reply_of(harness.client.xpending(name, group)))["pending"] == 0
    async with harness.database.session() as session:
        recorded = await recording.events_of_order(session, UUID(order_id))
    assert last.event_id in {event.event_id for event in recorded}


@fuzz_settings
@fuzz_timeout
@given(made=replies)
async def test_no_reply_to_a_claim_hides_the_right_one(
    harness: ActivityHarness, made: list[Any]
) -> None:
    token, claim_id = harness.keys.launch_token("w1"), f"c-{uuid4()}"
    worker = WorkerRef(worker_id="w1", task_id="", epoch=1, claim_id=claim_id, pool=POOL)
    reading = ClaimReplies(harness.client, harness.keys, worker)
    key = keys.pool_reply(POOL, "w1", claim_id)
    for message in made:
        payload = about(message, "u", "o").replace(b'"c1"', f'"{claim_id}"'.encode())
        signed = Signed(payload=payload, signatures=[sealing._prove_payload(token, payload)])
        await reply_of(harness.client.rpush(key, encode(signed)))
    right = ClaimReply(claim_id=claim_id, worker_id="w1", epoch=1, attempt=2**40)
    await reply_of(harness.client.rpush(key, sealing.prove_reply(right, token)))
    reply = await reading.present(2**40)
    assert reply is not None
    claim._result_of_reply(worker, reply)


@fuzz_settings
@fuzz_timeout
@given(made=answers)
async def test_no_answer_stops_the_writer_of_outcomes(
    harness: ActivityHarness, made: list[Any]
) -> None:
    strange, good = await accept_new_order(harness), await accept_new_order(harness)
    writer = OutcomeWriter(harness.database)
    for message in made:
        payload = about(message, "u", strange)
        try:
            answer = read_answer(f"{SERVICE}|mac|".encode() + payload).answer
        except MalformedMessage:
            continue
        outcome, code = outcome_of(answer, strange)
        writer.write_later(NotedOutcome(outcome, code))
        await writer.close()
    filled = OrderOutcome(order_id=good, state=OrderState.FILLED, filled_quantity=1)
    writer.write_later(NotedOutcome(filled))
    await writer.close()
    async with harness.database.session() as session:
        assert (await recording.get_order(session, UUID(good))).state == "filled"


#: Made once: to make the strategy of a message again for each example takes 10 ms.
any_message = st.one_of(
    *(
        st.tuples(st.just(kind), absurd_messages.messages(kind, KNOWN))
        for kind in (Request, InboxMessage, ControlMessage, Answer, ClaimReply, Event)
    )
)


@settings(max_examples=EXAMPLES * 20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@fuzz_timeout
@given(made=any_message)
def test_what_decodes_is_within_its_bounds_and_is_written_again(made: tuple[Any, Any]) -> None:
    kind, payload = made[0], absurd_messages.encoded(made[1])
    try:
        message: Any = decode(payload, kind)
    except MalformedMessage:
        return
    assert decode(encode(message), kind) == message


@settings(max_examples=EXAMPLES * 20, deadline=None)
@fuzz_timeout
@given(
    words=st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=5),
    raw=st.binary(),
)
def test_no_switch_metadata_number_or_frame_raises_in_its_reader(
    words: list[Any], raw: bytes
) -> None:
    listed = [b"*version", b"9" * 5000, *(word for pair in words for word in pair)]
    switch_of(listed, "s", SECRETS.request_keys("u"), "u")
    reply_number(raw)
    reply_progress(raw)
    read_metadata(dict(words), raw, "u", 1, lambda user, epoch: ())
    try:
        parse_frame(raw)
    except MalformedMessage:
        return
