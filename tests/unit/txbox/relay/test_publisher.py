"""A function as a publisher; a coroutine function as one."""

import asyncio
import re
from contextlib import suppress

import pytest

from txbox import BrokerError, InvalidConfiguration
from txbox.relay import AsyncFunctionPublisher, FunctionPublisher, OutboxMessage, PartlySent, Refused
from txbox.relay.dispatcher import Dispatcher
from txbox.relay.settlement import Row

MESSAGES = [OutboxMessage(f"m-{number}", "own:x", b"") for number in range(4)]


def test_several_of_a_call_are_awaited_together_and_no_more_than_asked_for() -> None:
    now, most = 0, 0

    async def send(message: OutboxMessage) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        if message is MESSAGES[1]:
            raise ValueError("not this one")

    [refused] = asyncio.run(AsyncFunctionPublisher(send, at_once=3).send(MESSAGES))
    assert (refused.message, refused.final, most) == (MESSAGES[1], False, 3)


def test_an_outage_lets_those_under_way_end_and_leaves_the_others() -> None:
    sent: list[OutboxMessage] = []

    async def send(message: OutboxMessage) -> None:
        await asyncio.sleep(0 if message is MESSAGES[0] else 0.01)
        if message is MESSAGES[0]:
            raise BrokerError("away")
        sent.append(message)

    with pytest.raises(PartlySent, match="away") as caught:
        asyncio.run(AsyncFunctionPublisher(send, at_once=2).send(MESSAGES))
    assert sent == [MESSAGES[1]]
    assert {message.id for message in caught.value.unsent} == {"m-0", "m-2", "m-3"}


def test_a_function_that_is_cancelled_by_itself_has_not_sent_its_message() -> None:
    async def send(message: OutboxMessage) -> None:
        if message is not MESSAGES[3]:
            cancelled = asyncio.get_running_loop().create_future()
            cancelled.cancel()
            await cancelled
        sent.append(message)

    sent: list[OutboxMessage] = []
    refused = asyncio.run(AsyncFunctionPublisher(send, at_once=2).send(MESSAGES))
    assert ([refusal.message for refusal in refused], sent) == (MESSAGES[:3], MESSAGES[3:])


def test_what_is_cancelled_with_its_call_is_not_sent() -> None:
    async def send(_: object) -> None:
        raise asyncio.CancelledError

    async def cancelled() -> None:
        sending = asyncio.create_task(AsyncFunctionPublisher(lambda _: asyncio.sleep(60)).send(MESSAGES))
        await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    async def cancelled_before() -> None:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        with pytest.raises(PartlySent) as caught:
            await AsyncFunctionPublisher(send, at_once=2).send(MESSAGES)
        assert list(caught.value.unsent) == MESSAGES

    asyncio.run(cancelled())
    asyncio.run(cancelled_before())


def test_what_stands_still_since_its_loop_has_ended_begins_nothing_more_when_it_is_forgotten() -> None:
    begun: list[OutboxMessage] = []

    async def send(message: OutboxMessage) -> None:
        begun.append(message)
        await asyncio.sleep(60)

    loop = asyncio.new_event_loop()
    sending = loop.create_task(AsyncFunctionPublisher(send, at_once=1).send(MESSAGES))
    loop.run_until_complete(asyncio.sleep(0.01))
    [waiting] = asyncio.all_tasks(loop) - {sending}
    loop.close()
    for task in (waiting, sending):
        task.get_coro().close()  # type: ignore[union-attr]
    assert begun == MESSAGES[:1]


async def coroutine(_: object) -> None:
    """Something that has to be awaited."""


async def twice_awaited(message: object) -> object:
    """Something whose result has to be awaited too, as the future of an aiokafka producer's ``send``."""
    return coroutine(message)


def test_what_is_never_awaited_is_never_taken_for_sent() -> None:
    with pytest.raises(InvalidConfiguration, match="use AsyncFunctionPublisher"):
        FunctionPublisher(coroutine)
    with pytest.raises(InvalidConfiguration, match="at_once must be at least 1"):
        AsyncFunctionPublisher(coroutine, at_once=0)

    for message, refusal in zip(MESSAGES, FunctionPublisher(lambda m: coroutine(m)).send(MESSAGES), strict=True):
        assert refusal.message is message
        assert "has returned a coroutine" in refusal.error
    [refusal] = asyncio.run(AsyncFunctionPublisher(twice_awaited).send(MESSAGES[:1]))
    assert "has returned a coroutine" in refusal.error

    class Mistaken:
        def send(self, messages: object) -> object:
            return coroutine(messages)

    dispatcher = Dispatcher({"own": Mistaken()}, 60, halted=lambda _: False)  # type: ignore[dict-item]
    result = dispatcher.dispatch([Row(1, 7, False, MESSAGES[0])], check_claim=lambda: None)
    assert result.sent == set()
    assert isinstance(result.refused[7], Refused)
    assert re.search("write its method as async def send", result.refused[7].error)
