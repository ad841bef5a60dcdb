"""What txbox raises: the drawn tree, the data, the texts."""

import copy
import pickle
import re
from datetime import UTC, datetime

import pytest

from txbox import errors

EXAMPLES = [
    errors.BrokerError("SQS is away", permanent=True),
    errors.EffectFailed("account.sql, line 3: division by zero"),
    errors.EffectUnknown("the mail server hung up before it had answered"),
    errors.EntityMissing("account", "account_id = 7"),
    errors.ExtraMissing("aws", "boto3"),
    errors.InFlight("billing", ["m-1", "m-2"]),
    errors.InFlight("mailing", ["m-1"], seconds=12.5),
    errors.InvalidConfiguration("Worker.threads must be at least 1, not 0"),
    errors.InvalidMessageId("a\0b", "holds a NUL character"),
    errors.LeaseLost("mailing", "m-1", 17),
    errors.LedgerError("DynamoDB cannot be reached", permanent=False),
    errors.LetterNotFound(7),
    errors.MalformedMessage("not JSON"),
    errors.MessageTooLarge("own:somewhere", 300_000, 262_144),
    errors.Mismatch("billing", ["m-2", "m-1"]),
    errors.Expired("billing", {"m-2": None, "m-1": datetime(2026, 4, 2, tzinfo=UTC)}, datetime(2026, 5, 2, tzinfo=UTC)),
    errors.NotInTransaction(),
    errors.NothingKept("no sent messages are kept"),
    errors.OutOfOrder(7, 5, "ann"),
    errors.NotSendable("own:somewhere", "takes no key"),
    errors.OperationNotFound(7),
    errors.ResultNotStored("mailing", "m-1", "it is no JSON"),
    errors.RightsMissing("outbox_message", "UPDATE, DELETE"),
    errors.SchemaMissing('"Odd schema-%".processed_message'),
    errors.SchemaMissing("processed_message", 'column "dead_letter_id" does not exist'),
    errors.StatementLeftOpen(),
    errors.TableLocked("paused"),
    errors.TransactionAborted(),
    errors.TransactionEnded(),
    errors.TransactionTimedOut(),
]


ABOVE = {
    "MessageTooLarge": errors.NotSendable,
    "NothingKept": errors.InvalidConfiguration,
    "StatementLeftOpen": errors.TransactionEnded,
    "TransactionAborted": errors.TransactionEnded,
}

ALSO = {"ExtraMissing": (ModuleNotFoundError,), "MalformedMessage": (ValueError,)}
"""Errors that are of another kind, too."""


def all_below(kind: type[Exception]) -> set[type[Exception]]:
    below = set(kind.__subclasses__())
    return below.union(*(all_below(one) for one in below))


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    drawn = re.findall(r"[├└]── (\w+) ", errors.__doc__ or "")
    ours = {kind.__name__ for kind in all_below(errors.TxboxError) if kind.__module__.startswith("txbox.")}
    ours -= {"PartlySent"}  # what publishers say to a relay; nobody else sees it
    assert sorted(drawn) == sorted(ours)
    assert sorted([*drawn, "TxboxError"]) == sorted(errors.__all__)
    for name in drawn:
        above = ABOVE.get(name, errors.TxboxError)
        assert getattr(errors, name).__bases__ == (above, *ALSO.get(name, ())), "where the tree draws it"


def test_every_error_has_an_example_here() -> None:
    kinds = {getattr(errors, name) for name in errors.__all__}
    assert {type(example) for example in EXAMPLES} == kinds - {errors.TxboxError}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_a_journey_to_another_process(error: errors.TxboxError) -> None:
    for arrived in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(arrived) is type(error)
        assert str(arrived) == str(error)
        assert vars(arrived) == vars(error)
        assert getattr(arrived, "name", None) == getattr(error, "name", None)


def test_in_flight_names_one_message_and_counts_many() -> None:
    one, many = errors.InFlight("billing", ["m-1"]), errors.InFlight("billing", iter(["m-1", "m-2"]))
    assert (one.subscriber_id, one.message_ids) == ("billing", ("m-1",))
    assert many.message_ids == ("m-1", "m-2")
    assert str(one).startswith("m-1 is being processed by another transaction of subscriber billing")
    assert str(many).startswith("one of 2 messages is being processed")
    assert "roll back" in str(one)


def test_mismatch_sorts_its_ids_and_shows_the_first_five() -> None:
    error = errors.Mismatch("billing", {f"m-{number}" for number in range(9)})
    assert error.message_ids == tuple(f"m-{number}" for number in range(9))
    assert "m-4" in str(error)
    assert "m-5" not in str(error)


def test_an_invalid_id_is_kept_whole_and_shown_in_part() -> None:
    error = errors.InvalidMessageId("x" * 500, "is too long")
    assert error.message_id == "x" * 500
    assert "x" * 80 in str(error)
    assert "x" * 81 not in str(error)


def test_a_broker_error_is_transient_unless_told_otherwise() -> None:
    assert errors.BrokerError("away").permanent is False
    assert errors.BrokerError("no such queue", permanent=True).permanent is True


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (errors.NotInTransaction(), "isolation level is not AUTOCOMMIT"),
        (
            errors.SchemaMissing("processed_message"),
            "table processed_message does not exist; create it with `txbox db upgrade`",
        ),
        (errors.InFlight("billing", ["m-1"]), "let the broker deliver it again"),
        (errors.Mismatch("billing", ["m-1"]), "choose another id with identify"),
        (
            errors.Expired("billing", {"m-1": None}),
            "check what became of it, then redrive it as expired, or discard it",
        ),
        (errors.TransactionTimedOut(), "the worker's transaction_seconds"),
        (errors.TransactionEnded(), "leave commit and rollback to the worker"),
        (errors.MessageTooLarge("own:x", 300_000, 262_144), "at most 262,144 bytes, and the message has 300,000"),
        (errors.RightsMissing("outbox_message", "DELETE"), "GRANT DELETE ON outbox_message"),
        (errors.LetterNotFound(7), "dead letter 7 does not exist; see `txbox dead-letters list --all`"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_text_says_what_to_do_next(error: errors.TxboxError, remedy: str) -> None:
    assert remedy in str(error)
