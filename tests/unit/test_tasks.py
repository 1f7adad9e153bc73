"""Waiting for what others wait for, too."""

from __future__ import annotations

import asyncio

import pytest

from infra.tasks import done_within


async def test_it_returns_as_soon_as_the_future_is_done_whatever_came_of_it() -> None:
    loop = asyncio.get_running_loop()
    result: asyncio.Future[int] = loop.create_future()
    failure: asyncio.Future[int] = loop.create_future()
    cancelled: asyncio.Future[int] = loop.create_future()
    loop.call_soon(result.set_result, 1)
    loop.call_soon(failure.set_exception, ValueError())
    loop.call_soon(cancelled.cancel)
    async with asyncio.timeout(5):
        for future in (result, failure, cancelled, result):
            await done_within(future, 60)
            assert future.done()
    assert isinstance(failure.exception(), ValueError)


@pytest.mark.parametrize("seconds", [0, 0.01])
async def test_it_returns_in_time_and_leaves_the_future_alone(seconds: float) -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    await done_within(future, seconds)
    assert not future.done()
    future.set_result(1)  # nobody is left to be told
    await asyncio.sleep(0)


async def test_who_is_cancelled_in_it_leaves_the_future_to_the_others() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    one, other = (asyncio.create_task(done_within(future, 60)) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.wait([one])
    assert one.cancelled()
    assert not future.done()
    future.set_result(1)
    await asyncio.wait_for(other, 5)
