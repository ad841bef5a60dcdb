"""One more action in an UpdateExpression, one more condition in a ConditionExpression."""

import pytest

from txbox_aws.dynamodb.entity import _enclosed, _with_action


@pytest.mark.parametrize(
    ("update", "merged"),
    [
        ("", "ADD #ids :id"),
        ("SET a = :a", "SET a = :a ADD #ids :id"),
        ("ADD a :a", "ADD #ids :id, a :a"),
        ("add a :a", "add #ids :id, a :a"),
        ("SET a = :a ADD b :b, c :c REMOVE d", "SET a = :a ADD #ids :id, b :b, c :c REMOVE d"),
        ("ADD\n\ta :a", "ADD #ids :id,\n\ta :a"),
        ("ADD#a :a", "ADD #ids :id,#a :a"),
        ("SET #add = :add", "SET #add = :add ADD #ids :id"),
        ("SET #add = :ADD ADD #x.ADD :y", "SET #add = :ADD ADD #ids :id, #x.ADD :y"),
        ("SET address = :a, padd = :b", "SET address = :a, padd = :b ADD #ids :id"),
        ("REMOVE #x.add ADD b :b", "REMOVE #x.add ADD #ids :id, b :b"),
    ],
)
def test_an_action_joins_the_clause_that_is_there(update: str, merged: str) -> None:
    assert _with_action(update, "ADD", "#ids :id") == merged


def test_a_set_clause_is_joined_as_well() -> None:
    assert _with_action("REMOVE a SET b = :b", "SET", "#h = :h") == "REMOVE a SET #h = :h, b = :b"
    assert _with_action("ADD a :a", "SET", "#h = :h") == "ADD a :a SET #h = :h"


@pytest.mark.parametrize(
    ("condition", "enclosed"),
    [
        ("a = :a", "(a = :a)"),
        ("(a = :a)", "(a = :a)"),
        (" (a = :a)\n", "(a = :a)"),
        ("(a = :a) OR (b = :b)", "((a = :a) OR (b = :b))"),
        ("((a = :a) OR (b = :b))", "((a = :a) OR (b = :b))"),
        ("size(a) > :a OR contains(b, :b)", "(size(a) > :a OR contains(b, :b))"),
        ("(a = :a", "((a = :a)"),
    ],
)
def test_no_condition_is_enclosed_twice(condition: str, enclosed: str) -> None:
    assert _enclosed(condition) == enclosed
