"""The worker on a real Postgres and a local SQS over HTTP."""

import itertools
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.aws.queues import attribute, send, sns_notification, wait_until_empty
from support.txbox.events import Kept
from support.waiting import wait_until
from support.workers.business import Business, apply, once
from support.workers.memory_worker import at_work
from txbox import BrokerError, DeadLetter, DeadLetters, Inbox, LetterNotFound, Message, Outcome, Reason
from txbox.backoff import Backoff
from txbox.instrumentation import HeartbeatFailed, Received, Settled
from txbox_aws.sqs import SqsWorker, redrive_to_queue

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

AT_ONCE = Backoff(first_seconds=0.0, longest_seconds=0.0)
"""SQS takes whole seconds; anything above 0 would be one."""

MakeQueue = Callable[..., str]


def make(queue: str, engine: Engine, handler: Any = apply, **options: Any) -> SqsWorker:
    """A worker that does not wait in a receive, so that it stops at once; where others have to wait, it does too."""
    options.setdefault("inbox", Inbox("billing", wait_seconds=0.2))
    options.setdefault("backoff", AT_ONCE)
    options.setdefault("wait_seconds", 0)
    if "batch_handler" not in options:
        options["handler"] = handler
    return SqsWorker(queue, engine=engine, **options)


def ids(count: int, prefix: str = "m") -> list[str]:
    return [f"{prefix}{number:04}" for number in range(count)]


# --- once ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"prefetch": 50}, {"batch_size": 40, "gather_seconds": 0.1}])
def test_what_is_sent_twice_and_redelivered_is_applied_once(
    engine: Engine, business: Business, sqs: "SQSClient", queue: str, options: dict[str, Any]
) -> None:
    send(sqs, queue, ids(60))
    send(sqs, queue, ids(20))
    with at_work(make(queue, engine, threads=2, **options), make(queue, engine, **options)):
        wait_until_empty(sqs, queue)
    assert business.applied() == once(ids(60))


def test_bodies_and_ids_that_cannot_be_read_are_parked_and_never_run(
    engine: Engine, business: Business, sqs: "SQSClient", queue: str
) -> None:
    def by_order(message: Message) -> str:
        return str(message.json()["order"])

    bad = {"not json", "{}", json.dumps({"order": "x" * 5000})}
    for body in (*bad, '{"order": 17}'):
        sqs.send_message(QueueUrl=queue, MessageBody=body)
    with at_work(make(queue, engine, envelope="json", identify=by_order, max_attempts=2)):
        wait_until_empty(sqs, queue)
    assert business.applied() == once(["17"])
    letters = DeadLetters(engine).list()
    assert {letter.body.decode() for letter in letters} == bad
    assert [letter.reason for letter in letters] == ["malformed"] * 3


@pytest.mark.parametrize("prefetch", [0, 50])
def test_deletes_that_sqs_does_not_confirm_lead_to_duplicates_that_are_rejected(
    engine: Engine, business: Business, sqs: "SQSClient", queue: str, prefetch: int
) -> None:
    """Every way in which DeleteMessageBatch can leave a message: a failed entry, a missing one, no answer at all."""
    lose = itertools.cycle(["fails", "forgets", "says nothing", "works"])

    class Losing:
        def __getattr__(self, name: str) -> Any:
            return getattr(sqs, name)

        def delete_message_batch(self, **arguments: Any) -> Any:
            match next(lose):
                case "fails":
                    failed = [{"Id": e["Id"], "SenderFault": True, "Code": "x"} for e in arguments["Entries"]]
                    return {"Failed": failed}
                case "forgets":
                    return {}
                case "says nothing":
                    raise LookupError("an answer that boto3 cannot read")
            return sqs.delete_message_batch(**arguments)

    kept = Kept()
    send(sqs, queue, ids(12))
    with at_work(
        make(queue, engine, client=Losing(), visibility_seconds=1, hooks=[kept], prefetch=prefetch, wait_seconds=1)
    ):
        wait_until_empty(sqs, queue)
    assert business.applied() == once(ids(12))
    acked = Counter(event.message_id for event in kept.of(Settled) if event.acked)
    assert acked == once(ids(12)), "only what SQS has confirmed counts as acked"


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 100])
def test_groups_keep_their_order_over_failures_retries_and_dead_letters(
    engine: Engine, business: Business, sqs: "SQSClient", make_queue: MakeQueue, prefetch: int
) -> None:
    queue = make_queue(fifo=True)
    groups = [f"g{number}" for number in range(6)]
    per_group = 12
    for start in range(0, per_group, 4):
        for group in groups:
            send(sqs, queue, [f"{group}-{number:02}" for number in range(start, start + 4)], group=group)
    dead = {"g0-03", "g3-00", "g5-11"}
    stumbles: Counter[str] = Counter()
    lock = threading.Lock()

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        with lock:
            stumbles[message.id] += 1
            times = stumbles[message.id]
        # Every fifth message fails in its first two runs, and some for ever.
        if message.id in dead or (int(message.id[-2:]) % 5 == 2 and times <= 3):
            raise ValueError("no")

    options = {"threads": 2, "max_attempts": 4, "prefetch": prefetch}
    workers = [make(queue, engine, handle, batch_size=size, **options) for size in (10, 4)]
    with at_work(*workers):
        wait_until_empty(sqs, queue, timeout=60)
    by_group: dict[str, list[str]] = defaultdict(list)
    for message_id in business.order():
        by_group[message_id.split("-")[0]].append(message_id)
    expected = {
        group: [id_ for number in range(per_group) if (id_ := f"{group}-{number:02}") not in dead] for group in groups
    }
    assert by_group == expected
    assert set(business.letters()) == dead


@pytest.mark.parametrize("options", [{}, {"prefetch": 50, "batch_size": 3}])
def test_followers_that_were_handed_back_do_not_overtake(
    engine: Engine, business: Business, sqs: "SQSClient", make_queue: MakeQueue, options: dict[str, Any]
) -> None:
    """The failed one comes back after two seconds, its followers could come at once."""
    queue = make_queue(fifo=True)
    send(sqs, queue, ids(6), group="g")
    failures = iter(range(2))

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id == "m0002" and next(failures, None) is not None:
            raise ValueError("not yet")

    slow = Backoff(first_seconds=1.5, longest_seconds=1.5)
    kept = Kept()
    workers = [make(queue, engine, handle, backoff=slow, hooks=[kept], wait_seconds=1, **options) for _ in range(2)]
    with at_work(*workers):
        wait_until_empty(sqs, queue)
    assert business.order() == ids(6)
    assert kept.outcomes("m0002")[0] is Outcome.FAILED
    assert kept.outcomes("m0003")[0] is Outcome.IN_FLIGHT


# --- the heartbeat ---------------------------------------------------------------------------------------------------


def test_a_handler_slower_than_the_visibility_runs_once_and_nothing_is_delivered_again(
    engine: Engine, business: Business, sqs: "SQSClient", queue: str
) -> None:
    kept, runs = Kept(), []
    extensions: Counter[str] = Counter()
    long_enough = threading.Event()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(sqs, name)

        def change_message_visibility_batch(self, **arguments: Any) -> Any:
            answer = sqs.change_message_visibility_batch(**arguments)
            receipts = {entry["Id"]: entry["ReceiptHandle"] for entry in arguments["Entries"]}
            extensions.update(receipts[done["Id"]] for done in answer.get("Successful", ()))
            # Half the visibility lies between one and the next, and before the first: more than twice it has passed.
            if 5 in extensions.values():
                long_enough.set()
            return answer

    def handle(session: Session, message: Message) -> None:
        runs.append(message.id)
        apply(session, message)
        if message.id == "a":
            wait_until(long_enough.is_set, "one delivery is extended five times")

    send(sqs, queue, ["a", "b"])
    # A second worker waits for anything that becomes visible.
    workers = [
        make(queue, engine, handle, visibility_seconds=2, hooks=[kept], client=Counting(), wait_seconds=1)
        for _ in range(2)
    ]
    with at_work(*workers):
        wait_until_empty(sqs, queue)
    assert sorted(runs) == ["a", "b"]
    assert business.applied() == once("ab")
    assert sorted(id_ for event in kept.of(Received) for id_ in event.message_ids) == ["a", "b"]
    assert {event.attempts for event in kept.of(Settled)} == {1}
    assert kept.of(HeartbeatFailed) == []


def test_without_a_heartbeat_the_inbox_still_holds(
    engine: Engine, business: Business, sqs: "SQSClient", queue: str
) -> None:
    class Deaf:
        def __getattr__(self, name: str) -> Any:
            return getattr(sqs, name)

        def change_message_visibility_batch(self, **_: Any) -> Any:
            raise BrokerError("nobody hears")

    kept, runs = Kept(), []

    def handle(session: Session, message: Message) -> None:
        runs.append(message.id)
        apply(session, message)
        if len(runs) == 1:
            wait_until(lambda: len(kept.of(Received)) >= 2, "delivered again")

    send(sqs, queue, ["a"])
    workers = [
        make(queue, engine, handle, visibility_seconds=1, hooks=[kept], client=Deaf(), max_attempts=20, wait_seconds=1)
        for _ in range(2)
    ]
    with at_work(*workers):
        wait_until_empty(sqs, queue)
    assert business.applied() == once("a")
    assert runs == ["a"]
    assert kept.of(HeartbeatFailed)


# --- stopping --------------------------------------------------------------------------------------------------------


def test_start_refuses_a_queue_that_does_not_exist(engine: Engine, queue: str) -> None:
    worker = make(f"{queue}-missing", engine)
    with pytest.raises(BrokerError, match="create the queue") as refused:
        worker.start()
    assert refused.value.permanent
    assert not worker.running
    worker.source.close()


# --- redrive ---------------------------------------------------------------------------------------------------------


def park(sqs: "SQSClient", queue: str, engine: Engine) -> dict[str, int]:
    """Let every message in the queue fail, and return its dead letter's number."""

    def broken(session: Session, message: Message) -> None:
        apply(session, message)
        raise ValueError("the handler is broken")

    with at_work(make(queue, engine, broken, max_attempts=1)):
        wait_until_empty(sqs, queue)
    letters = DeadLetters(engine).list()
    assert all(letter.reason == "failed" for letter in letters)
    return {letter.message_id: letter.dead_letter_id or 0 for letter in letters}


@pytest.mark.parametrize("fifo", [False, True])
def test_a_redriven_letter_is_processed_once_under_the_id_it_had(
    engine: Engine, business: Business, sqs: "SQSClient", make_queue: MakeQueue, fifo: bool
) -> None:
    """Of a standard queue, with an id of its own, of the broker's, and of SNS; of a FIFO queue, its group's."""
    body = "the purchase"
    expected: set[str] = set()

    def sent(expected_id: str | None, body: str = body, **more: Any) -> None:
        message = sqs.send_message(QueueUrl=queue, MessageBody=body, **more)
        expected.add(expected_id or message["MessageId"])

    if fifo:
        queue = make_queue(fifo=True, ContentBasedDeduplication="true")
        sent("g dedup", MessageGroupId="g", MessageDeduplicationId="dedup")
        sent(None, MessageGroupId="g")
    else:
        queue = make_queue()
        picture = {"DataType": "Binary", "BinaryValue": b"\0\xff"}
        sent("own", MessageAttributes={"message-id": attribute("own"), "picture": picture})
        sent(None)
        sent("sns-1", sns_notification(body, "sns-1"))
        sent("own, by sns", sns_notification(body, "sns-2", {"message-id": "own, by sns", "colour": "red"}))
    numbers = park(sqs, queue, engine)
    assert numbers.keys() == expected
    assert business.applied() == once([])

    letters = DeadLetters(engine)
    headers: dict[str, dict[str, str]] = {}

    def repaired(session: Session, message: Message) -> None:
        headers[message.id] = dict(message.headers)
        apply(session, message)

    for number in numbers.values():  # as after a crash between send and commit: it is sent twice
        redrive_to_queue(letters.get(number), client=sqs)
        letters.redrive(number, lambda letter: redrive_to_queue(letter, client=sqs))
        with pytest.raises(LetterNotFound, match="redriven before"):
            letters.redrive(number, lambda letter: redrive_to_queue(letter, client=sqs))
    worker = make(queue, engine, repaired)
    with at_work(worker):
        wait_until_empty(sqs, queue)
    assert business.recorded() == expected
    assert business.applied() == once(expected)
    assert set(business.order("body")) == {"the purchase"}
    assert worker.counts == {Outcome.PROCESSED: len(expected), Outcome.DUPLICATE: len(expected)}
    assert letters.list() == []
    if not fifo:
        assert headers["own"]["picture"] == "AP8="
        assert headers["own, by sns"]["colour"] == "red"


@pytest.mark.parametrize("fifo", [False, True])
def test_a_letter_that_was_never_in_a_queue_arrives_there_as_it_was_published(
    sqs: "SQSClient", make_queue: Callable[..., str], engine: Engine, fifo: bool
) -> None:
    queue = make_queue(fifo=fifo)
    headers, envelope = {"tenant": "t-1"}, {"key": "ann"}
    letter = DeadLetter(
        "billing", "m", Reason.FAILED, "no", 3, "inbox:billing", b"\x00\xff", headers, envelope, order_key="ann"
    )
    redrive_to_queue(letter, client=sqs, queue_url=queue)
    seen: list[Message] = []
    with at_work(make(queue, engine, lambda _, message: seen.append(message))):
        wait_until_empty(sqs, queue)
    assert [(one.id, one.body, one.headers["tenant"]) for one in seen] == [("m", b"\x00\xff", "t-1")]
    assert seen[0].headers["sqs-group-id" if fifo else "key"] == "ann"
