"""Publishers for tests of the relay: one that remembers, and one that fails in every way a broker can."""

import asyncio
import random
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from support.waiting import wait_until
from txbox import BrokerError
from txbox.relay import OutboxMessage, PartlySent, Publisher, Refused


class RecordingPublisher:
    """Takes every message, and remembers what it was given, in order.

    Attributes:
        received: the messages, in the order of their arrival.
        calls: how many messages each call had.
    """

    def __init__(
        self,
        refuse: Callable[[OutboxMessage], str | None] = lambda _: None,
        *,
        final: bool = False,
        before: Callable[[Sequence[OutboxMessage]], object] = lambda _: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        """Take what is to happen.

        Args:
            refuse: why a message is refused; None: it is not.
            final: whether that is for good.
            before: called with the messages of each call before they arrive.
            after: called after they have.
        """
        self.received: list[OutboxMessage] = []
        self.refused: list[OutboxMessage] = []
        self.calls: list[int] = []
        self._refuse = refuse
        self._final = final
        self._before, self._after = before, after
        self._lock = threading.Lock()

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        self._before(messages)
        refusals = [Refused(message, why, self._final) for message in messages if (why := self._refuse(message))]
        refused = {id(refusal.message) for refusal in refusals}
        with self._lock:
            self.calls.append(len(messages))
            self.refused += [message for message in messages if id(message) in refused]
            self.received += [message for message in messages if id(message) not in refused]
        self._after()
        return refusals

    @property
    def bodies(self) -> list[str]:
        """What has arrived."""
        return [message.body.decode() for message in self.received]

    def wait_for(self, count: int, *, timeout: float = 30.0) -> None:
        """Wait until so many have arrived."""
        wait_until(lambda: len(self.received) >= count, f"{count} messages to arrive", timeout=timeout, every=0.005)


async def at_once(_: object) -> None:
    """Wait for nothing."""
    await asyncio.sleep(0)


class AsyncRecorder(RecordingPublisher):
    """Remembers what it was given, after something was awaited.

    Attributes:
        cancelled: how many calls were cancelled while they waited.
        lives: how often it was entered, and left.
    """

    def __init__(self, wait: Callable[[Sequence[OutboxMessage]], Awaitable[object]] = at_once) -> None:
        super().__init__()
        self._wait = wait
        self.cancelled = 0
        self.lives: list[str] = []

    async def __aenter__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.lives.append("entered")

    async def __aexit__(self, *_: object) -> None:
        assert self.loop is asyncio.get_running_loop()
        self.lives.append("left")

    async def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:  # type: ignore[override]
        try:
            await self._wait(messages)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return super().send(messages)


async def wait_for_freedom(freed: threading.Event) -> None:
    while not freed.is_set():
        await asyncio.sleep(0.01)


class Awaited:
    """Another publisher as an async one: its calls run in threads, and are awaited."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._threads: ThreadPoolExecutor | None = None

    async def __aenter__(self) -> None:
        self._threads = ThreadPoolExecutor(64)

    async def __aexit__(self, *_: object) -> None:
        assert self._threads is not None
        self._threads.shutdown(wait=False)

    async def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._publisher.send, messages)


class FailingPublisher:
    """A broker on a bad day: takes messages, refuses some, is lost in between, and forgets to say that it took them.

    What it says is true as far as it goes: what it confirms has arrived. What it does not confirm may have arrived too.
    """

    def __init__(self, seed: int, *, trouble: float = 0.2, receiver: "RecordingPublisher | None" = None) -> None:
        self._random = random.Random(seed)
        self._trouble = trouble
        self.receiver = receiver or RecordingPublisher()
        self._lock = threading.Lock()

    def calm(self) -> None:
        """Fail no more."""
        self._trouble = 0.0

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        with self._lock:
            kinds = [self._kind() for _ in messages]
            lost = self._random.random() < self._trouble
            until = self._random.randrange(len(messages) + 1) if lost else len(messages)
        refused: list[Refused] = []
        unsent: list[OutboxMessage] = list(messages[until:])
        for message, kind in zip(messages[:until], kinds, strict=False):
            if kind != "refused":
                self.receiver.send([message])
            if kind in ("refused", "taken, and called refused"):
                refused.append(Refused(message, kind))
            elif kind == "taken, and not confirmed":
                unsent.append(message)
        if lost and self._random.random() < 0.3:
            raise BrokerError("lost, and nothing is known")
        if unsent:
            raise PartlySent("lost in between", unsent=unsent, refused=refused)
        return refused

    def _kind(self) -> str:
        if self._random.random() >= self._trouble:
            return "taken"
        return self._random.choice(["refused", "taken, and called refused", "taken, and not confirmed"])


def first_arrivals(received: Iterable[OutboxMessage]) -> dict[str | None, list[str]]:
    """Return the bodies of each key in the order in which each arrived for the first time."""
    seen: set[str] = set()
    arrived: dict[str | None, list[str]] = defaultdict(list)
    for message in received:
        if message.id not in seen:
            seen.add(message.id)
            arrived[message.key].append(message.body.decode())
    return dict(arrived)
