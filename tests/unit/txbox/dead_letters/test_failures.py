"""How an error becomes text that Postgres can keep."""

import itertools

from sqlalchemy.exc import IntegrityError

from txbox.dead_letters.failures import MAX_ERROR_CHARACTERS, describe


def chained(*errors: Exception) -> Exception:
    for outer, cause in itertools.pairwise(errors):
        outer.__cause__ = cause
    return errors[0]


def test_an_error_is_told_with_its_type_and_its_causes() -> None:
    error = chained(RuntimeError("no stock"), KeyError("sku-1"))
    assert describe(error) == "RuntimeError: no stock\ncaused by KeyError: 'sku-1'"


def test_a_long_chain_is_cut_and_a_circle_ends() -> None:
    assert describe(chained(*(ValueError(str(number)) for number in range(9)))).count("caused by") == 3
    circle = ValueError("again")
    circle.__cause__ = circle
    assert describe(circle).count("caused by") == 3


def test_a_long_text_is_cut() -> None:
    assert len(describe(ValueError("x" * 100_000))) == MAX_ERROR_CHARACTERS


def test_an_error_that_cannot_be_printed_is_told_nevertheless() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise LookupError

    assert describe(Unprintable()) == "Unprintable: (str() of it raised LookupError)"


def test_the_values_of_a_statement_are_not_kept() -> None:
    """They are the message's content, and may be personal."""
    refused = IntegrityError("INSERT INTO account VALUES (%s)", ("Zoe, 1 Main Street",), ValueError("duplicate key"))
    refused.__cause__ = refused.orig
    wrapped = RuntimeError("not billed")
    wrapped.__cause__ = refused
    assert describe(wrapped) == (
        "RuntimeError: not billed\ncaused by IntegrityError: duplicate key [SQL: INSERT INTO account VALUES (%s)]"
    )
