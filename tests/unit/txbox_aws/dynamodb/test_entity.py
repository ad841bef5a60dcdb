"""One more condition in a ConditionExpression."""

import pytest

from txbox_aws.dynamodb.entity import _enclosed


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
