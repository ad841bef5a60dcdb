"""SQS's own dead-letter queues: imported under the ids that the messages had, with nothing lost at any step."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import ProgrammingError

from support.aws.queues import attribute, held, send, sns_notification
from support.txbox.horizon import LONG_AGO, forget, id_of
from support.waiting import wait_until
from support.workers.memory_worker import at_work
from txbox import BrokerError, DeadLetters, Failures, Inbox, InvalidConfiguration, Message, Reason
from txbox_aws.sqs import DeadLetterQueue, ImportedLetters, SqsSource, SqsWorker, redrive_to_queue
from txbox_workers.delivery import Delivery

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient


class Killed(BaseException):
    """What a test raises where a process would die."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txbox_aws.sqs.dead_letter_queue.IMPORT_WAIT_SECONDS", 0)


@pytest.fixture
def soon_visible(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[object]]:
    """For a while, have what an import leaves come again after a second; a slow import would meet it twice."""

    @contextmanager
    def patched() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr("txbox_aws.sqs.dead_letter_queue.IMPORT_VISIBILITY_SECONDS", 1)
            yield

    return patched


@pytest.fixture
def queues(sqs: "SQSClient", make_queue: Callable[..., str]) -> tuple[str, str]:
    """A queue, and the dead-letter queue that SQS moves its messages to after two receives."""
    return with_policy(sqs, make_queue)


def with_policy(sqs: "SQSClient", make_queue: Callable[..., str], *, fifo: bool = False) -> tuple[str, str]:
    dead = make_queue(fifo=fifo)
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 2})
    return make_queue(fifo=fifo, RedrivePolicy=policy), dead


def exhaust(sqs: "SQSClient", queue: str, dead: str, count: int) -> None:
    """Receive messages until SQS has moved so many."""

    def moved() -> bool:
        sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10, VisibilityTimeout=0)
        return held(sqs, dead)["waiting"] == count

    wait_until(moved, "SQS moving the messages")


@pytest.fixture
def dead_letter_queue(queues: tuple[str, str], sqs: "SQSClient") -> Iterator[DeadLetterQueue]:
    found = DeadLetterQueue(queues[1], client=sqs)
    yield found
    found.close()


def imported(engine: Engine, dead: DeadLetterQueue, **options: Any) -> ImportedLetters:
    return dead.import_letters(DeadLetters(engine), Failures(engine, "billing"), **options)


def test_messages_become_letters_under_the_ids_they_had_and_go_back_to_their_queue(
    engine: Engine, sqs: "SQSClient", queues: tuple[str, str], dead_letter_queue: DeadLetterQueue
) -> None:
    queue, dead = queues
    send(sqs, queue, ["own-1"])
    by_broker = sqs.send_message(QueueUrl=queue, MessageBody="{}")["MessageId"]
    sqs.send_message(QueueUrl=queue, MessageBody=sns_notification("{}", "sns-1"))
    Failures(engine, "billing").fail("own-1", ValueError("no stock"))
    exhaust(sqs, queue, dead, 3)
    assert imported(engine, dead_letter_queue) == ImportedLetters(parked=3)
    assert sum(held(sqs, dead).values()) == 0
    letters = {letter.message_id: letter for letter in DeadLetters(engine).list()}
    assert set(letters) == {"own-1", by_broker, "sns-1"}
    own = letters["own-1"]
    assert (own.subscriber_id, own.reason, own.source, own.attempts) == ("billing", "failed", queue, 1)
    name = dead.rpartition("/")[2]
    assert own.error == (
        f"SQS moved it to the dead-letter queue {name} after 2 receives; last error: ValueError: no stock"
    )
    assert own.history[0]["error"] == "ValueError: no stock"
    assert Failures(engine, "billing").attempts("own-1") == 0, "it does not count as retrying any more"
    applied: list[str] = []
    worker = SqsWorker(
        queue,
        inbox=Inbox("billing"),
        engine=engine,
        handler=lambda _, message: applied.append(message.id),
        client=sqs,
        wait_seconds=0,
    )
    with at_work(worker):
        for letter in letters.values():  # as after a crash between send and commit: twice
            redrive_to_queue(letter, client=sqs)
            DeadLetters(engine).redrive(letter.dead_letter_id or 0, lambda one: redrive_to_queue(one, client=sqs))
        wait_until(lambda: sum(worker.counts.values()) >= 6 and not sum(held(sqs, queue).values()), "all acked")
    assert Counter(applied) == Counter(["own-1", by_broker, "sns-1"])


def test_what_is_processed_is_not_parked_and_what_is_parked_is_one_letter(
    engine: Engine, sqs: "SQSClient", queues: tuple[str, str], dead_letter_queue: DeadLetterQueue
) -> None:
    queue, dead = queues
    send(sqs, queue, ["done", "parked", "new"])
    exhaust(sqs, queue, dead, 3)
    with engine.begin() as connection:
        assert Inbox("billing").record(connection, "done")
    send(sqs, dead, ["parked", "other"])  # copies, in the dead-letter queue itself
    assert imported(engine, dead_letter_queue, source=queue) == ImportedLetters(parked=3, processed=1, copies=1)
    assert sorted(letter.message_id for letter in DeadLetters(engine).list()) == ["new", "other", "parked"]
    assert sum(held(sqs, dead).values()) == 0


def test_what_may_have_been_processed_and_forgotten_is_parked_as_expired(
    engine: Engine, sqs: "SQSClient", queues: tuple[str, str], dead_letter_queue: DeadLetterQueue
) -> None:
    queue, dead = queues
    letters = DeadLetters(engine)
    send(sqs, dead, ["failed"])
    assert imported(engine, dead_letter_queue, source=queue) == ImportedLetters(parked=1)
    processed = id_of(LONG_AGO)
    with engine.begin() as connection:
        assert Inbox("billing").record(connection, processed)
    forget(engine, processed)
    send(sqs, dead, ["failed", processed])
    assert imported(engine, dead_letter_queue, source=queue) == ImportedLetters(parked=2)
    failed, expired = letters.list()
    assert (failed.message_id, failed.reason) == ("failed", Reason.FAILED), "it is known not to be processed"
    assert (expired.message_id, expired.reason) == (processed, Reason.EXPIRED)
    assert "SQS moved it" in expired.error
    assert "redrive it as expired" in expired.error
    with pytest.raises(InvalidConfiguration, match="too old to tell"):
        letters.redrive(expired.dead_letter_id or 0, lambda _: pytest.fail("it is not sent"))


def test_what_another_transaction_processes_is_left(
    engine: Engine,
    sqs: "SQSClient",
    queues: tuple[str, str],
    dead_letter_queue: DeadLetterQueue,
    soon_visible: Callable[[], AbstractContextManager[object]],
) -> None:
    queue, dead = queues
    send(sqs, queue, ["busy"])
    exhaust(sqs, queue, dead, 1)
    with engine.begin() as connection, soon_visible():
        assert Inbox("billing").record(connection, "busy")
        assert imported(engine, dead_letter_queue) == ImportedLetters(in_flight=1)
        assert DeadLetters(engine).list() == []
    wait_until(lambda: held(sqs, dead)["waiting"] == 1, "its visibility ending")
    assert imported(engine, dead_letter_queue) == ImportedLetters(processed=1)


@pytest.mark.parametrize("dies", ["before the letter is committed", "after one is committed", "before the delete"])
def test_an_import_that_dies_loses_nothing_and_parks_nothing_twice(
    engine: Engine,
    sqs: "SQSClient",
    queues: tuple[str, str],
    dead_letter_queue: DeadLetterQueue,
    monkeypatch: pytest.MonkeyPatch,
    soon_visible: Callable[[], AbstractContextManager[object]],
    dies: str,
) -> None:
    queue, dead = queues
    ids = [f"m-{number}" for number in range(5)]
    send(sqs, queue, ids)
    exhaust(sqs, queue, dead, 5)
    park, parked = DeadLetters.park, []

    def dying_park(self: DeadLetters, *arguments: Any, **options: Any) -> int | None:
        if dies == "before the letter is committed" or (dies == "after one is committed" and parked):
            raise Killed
        parked.append(1)
        return park(self, *arguments, **options)

    def dying_ack(self: SqsSource, deliveries: Sequence[Delivery]) -> Collection[str]:
        raise Killed

    with soon_visible(), monkeypatch.context() as patched:
        patched.setattr(DeadLetters, "park", dying_park)
        patched.setattr(SqsSource, "ack", dying_ack)
        with pytest.raises(Killed):
            imported(engine, dead_letter_queue)
    assert sum(held(sqs, dead).values()) == 5, "nothing is deleted"
    committed = {"before the letter is committed": 0, "after one is committed": 1, "before the delete": 5}[dies]
    assert len(DeadLetters(engine).list()) == committed
    wait_until(lambda: held(sqs, dead)["waiting"] == 5, "the visibility of the dead one's messages ending")
    assert imported(engine, dead_letter_queue) == ImportedLetters(parked=5)
    assert Counter(letter.message_id for letter in DeadLetters(engine).list()) == Counter(ids)
    assert sum(held(sqs, dead).values()) == 0


def test_an_import_that_fails_leaves_the_rest_at_once(
    engine: Engine, sqs: "SQSClient", queues: tuple[str, str], dead_letter_queue: DeadLetterQueue
) -> None:
    queue, dead = queues
    send(sqs, queue, ["m-1", "m-2"])
    exhaust(sqs, queue, dead, 2)
    with pytest.raises(ProgrammingError, match="no_"):
        dead_letter_queue.import_letters(DeadLetters(engine, prefix="no_"), Failures(engine, "billing"))
    assert imported(engine, dead_letter_queue) == ImportedLetters(parked=2)


def test_a_count_leaves_the_rest_at_once(
    engine: Engine, sqs: "SQSClient", queues: tuple[str, str], dead_letter_queue: DeadLetterQueue
) -> None:
    queue, dead = queues
    send(sqs, queue, [f"m-{number}" for number in range(13)])
    exhaust(sqs, queue, dead, 13)
    assert imported(engine, dead_letter_queue, count=11) == ImportedLetters(parked=11)
    assert len(DeadLetters(engine).list()) == 11
    assert held(sqs, dead)["waiting"] == 2, "nothing of them is kept invisible"


def test_a_request_to_end_is_met_after_ten_messages(
    engine: Engine, sqs: "SQSClient", queues: tuple[str, str], dead_letter_queue: DeadLetterQueue
) -> None:
    queue, dead = queues
    send(sqs, queue, [f"m-{number}" for number in range(13)])
    exhaust(sqs, queue, dead, 13)
    assert imported(engine, dead_letter_queue, report=lambda _: True).parked == 10
    assert held(sqs, dead)["waiting"] == 3


def test_envelope_and_identify_are_those_of_the_workers(
    engine: Engine, sqs: "SQSClient", queues: tuple[str, str], dead_letter_queue: DeadLetterQueue
) -> None:
    queue, dead = queues
    sqs.send_message(QueueUrl=queue, MessageBody='{"order": 17}')
    no_json = sqs.send_message(QueueUrl=queue, MessageBody="order 18")["MessageId"]
    exhaust(sqs, queue, dead, 2)

    def order(message: Message) -> str:
        assert message.source == queue, "as a worker of the queue sees it"
        return f"order-{message.json()['order']}"

    assert imported(engine, dead_letter_queue, envelope="json", identify=order).parked == 2
    found = {letter.message_id: letter for letter in DeadLetters(engine).list()}
    assert (found["order-17"].reason, found[no_json].reason) == (Reason.FAILED, Reason.MALFORMED)
    assert "; MalformedMessage: " in found[no_json].error


def test_a_fifo_queue_s_letters_keep_group_and_deduplication_id(
    engine: Engine, sqs: "SQSClient", make_queue: Callable[..., str]
) -> None:
    queue, dead = with_policy(sqs, make_queue, fifo=True)
    sqs.send_message(QueueUrl=queue, MessageBody="1", MessageGroupId="g", MessageDeduplicationId="d")
    exhaust(sqs, queue, dead, 1)
    assert imported(engine, DeadLetterQueue(dead, client=sqs)).parked == 1
    (letter,) = DeadLetters(engine).list()
    assert letter.message_id == "g d"
    assert letter.source == queue
    assert letter.envelope["system"]["MessageGroupId"] == "g"


def test_the_source_is_asked_for_where_two_queues_share_a_dead_letter_queue(
    engine: Engine,
    sqs: "SQSClient",
    make_queue: Callable[..., str],
    queues: tuple[str, str],
) -> None:
    queue, dead = queues
    policy = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["RedrivePolicy"])["Attributes"]["RedrivePolicy"]
    other = make_queue(RedrivePolicy=policy)
    found = DeadLetterQueue(dead, client=sqs)
    assert found.source_queues() == sorted([queue, other])
    send(sqs, queue, ["m"])
    exhaust(sqs, queue, dead, 1)
    with pytest.raises(InvalidConfiguration, match="Name it with --source"):
        imported(engine, found)
    assert DeadLetters(engine).list() == []
    assert imported(engine, found, source=other).parked == 1
    assert DeadLetters(engine).list()[0].source == other


def test_where_sqs_says_whence_a_message_came_that_counts(
    engine: Engine, sqs: "SQSClient", queues: tuple[str, str], dead_letter_queue: DeadLetterQueue
) -> None:
    # SQS gives DeadLetterQueueSourceArn with each message; the local one does not, so it is added to its answer.
    queue, dead = queues
    send(sqs, queue, ["m"])
    exhaust(sqs, queue, dead, 1)
    arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]

    def add_source(parsed: dict[str, Any], **_: Any) -> None:
        for message in parsed.get("Messages", ()):
            message["Attributes"]["DeadLetterQueueSourceArn"] = arn

    sqs.meta.events.register("after-call.sqs.ReceiveMessage", add_source)
    try:
        assert imported(engine, dead_letter_queue).parked == 1
    finally:
        sqs.meta.events.unregister("after-call.sqs.ReceiveMessage", add_source)
    (letter,) = DeadLetters(engine).list()
    assert letter.source == queue
    assert letter.envelope["system"]["DeadLetterQueueSourceArn"] == arn


def test_another_body_under_an_id_that_is_processed_becomes_a_mismatch(
    engine: Engine, sqs: "SQSClient", queues: tuple[str, str], dead_letter_queue: DeadLetterQueue
) -> None:
    queue, dead = queues
    sqs.send_message(QueueUrl=queue, MessageBody="b", MessageAttributes={"message-id": attribute("m")})  # type: ignore[dict-item]
    exhaust(sqs, queue, dead, 1)
    with engine.begin() as connection:
        assert Inbox("billing", fingerprint=True).record(connection, "m", b"a")
    assert imported(engine, dead_letter_queue).parked == 1
    assert DeadLetters(engine).list()[0].reason is Reason.MISMATCH


def test_the_local_sqs_cannot_move_messages_and_that_is_said(dead_letter_queue: DeadLetterQueue) -> None:
    with pytest.raises(BrokerError, match="StartMessageMoveTask"):
        dead_letter_queue.start_move()
