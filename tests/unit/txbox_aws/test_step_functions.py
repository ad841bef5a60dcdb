"""The names and inputs of executions, and whose start it was: pure functions."""

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from txbox import InvalidConfiguration, InvalidMessageId, MalformedMessage, Message, MessageTooLarge
from txbox_aws.step_functions import MAX_INPUT_BYTES, Executions, execution_name, same_json, was_there_before

ARN = "arn:aws:states:us-east-1:123456789012:stateMachine:orders"
FORBIDDEN = set(' \t\n<>{}[]?*"#%\\^|~`$&,;:/\x00\x1f\x7f\x9f')
"""https://docs.aws.amazon.com/step-functions/latest/apireference/API_StartExecution.html"""


@pytest.mark.parametrize(
    "message_id", ["01a201b8-bb5b-7011-a010-43dfa6d7a632", "a", "x" * 80, "order_17.v2-b", "a=b@c+(d)!'"]
)
def test_an_id_that_can_be_a_name_is_the_name(message_id: str) -> None:
    assert execution_name(message_id) == message_id


@pytest.mark.parametrize(
    ("message_id", "readable"),
    [
        ("https://shop.example/orders 17", "https-shop-exam"),
        ("x" * 81, "x" * 15),
        ("é", "message"),
        ("::", "message"),
        (" a b ", "a-b"),
    ],
)
def test_another_id_is_named_by_what_can_be_read_of_it_and_its_digest(message_id: str, readable: str) -> None:
    assert execution_name(message_id) == f"{readable}-{hashlib.sha256(message_id.encode()).hexdigest()}"


def test_an_id_that_looks_like_a_made_name_is_not_taken_as_it_is() -> None:
    made = execution_name("a b")
    assert execution_name(made) not in (made, "a b")
    assert execution_name(execution_name(made)) != execution_name(made)


IDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=120)


@given(IDS, IDS)
@example("a b", "a-b")
@example("A", "a")
@example("a b", "a-" + hashlib.sha256(b"a b").hexdigest())
@example("a\n", "a")
def test_two_ids_never_have_one_name_and_every_name_is_allowed(one: str, other: str) -> None:
    names = [execution_name(one), execution_name(other)]
    assert (names[0] == names[1]) == (one == other)
    for name in names:
        assert 1 <= len(name) <= 80
        assert name.isascii()
        assert not FORBIDDEN & set(name)


@pytest.mark.parametrize("message_id", ["", "a\0b", "x" * 1001])
def test_what_is_no_message_id_is_no_name(message_id: str) -> None:
    with pytest.raises(InvalidMessageId):
        execution_name(message_id)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": [true, null]}', '{"b":[true,null],"a":1.0}'),
        ('"é"', '"\\u00e9"'),
        ("1e3", "1000"),
        ("0.1", "1e-1"),
        ("not JSON", "not JSON"),
    ],
)
def test_ways_to_write_the_same_value_are_the_same(one: str, other: str) -> None:
    assert same_json(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "true"),
        ("0", "false"),
        ("1", '"1"'),
        ("null", "0"),
        ("[1, 2]", "[2, 1]"),
        ('["number", 1]', "1"),
        ("9007199254740993", "9007199254740992"),
        ("0.1", "0.1000000000000000055511151231257827"),
        ('{"a": 1}', '{"a": 1, "b": null}'),
    ],
)
def test_other_values_are_others(one: str, other: str) -> None:
    assert not same_json(one, other)


MOMENT = datetime(2026, 1, 1, 12, 0, 10, tzinfo=UTC)
DATE = "Thu, 01 Jan 2026 12:00:10 GMT"


@pytest.mark.parametrize(
    ("seconds_before", "call_seconds", "expected"),
    [
        (0, 0.1, False),
        (-0.9, 0.1, False),  # the header is cut to whole seconds
        (1.0, 0.1, False),  # may be what two clocks differ by
        (1.2, 0.1, True),
        (5, 0.1, True),
        (5, 4.5, False),  # started by a first try of this call, whose answer was lost
        (90 * 86_400, 30, True),
    ],
)
def test_a_start_before_the_call_is_another_calls(seconds_before: float, call_seconds: float, expected: bool) -> None:
    assert was_there_before(MOMENT - timedelta(seconds=seconds_before), DATE, call_seconds) is expected


@pytest.mark.parametrize("date", [None, "", "yesterday", "Thu, 99 Jan 2026 12:00:10 GMT"])
def test_without_the_servers_time_nothing_is_known_to_be_earlier(date: str | None) -> None:
    assert was_there_before(MOMENT - timedelta(days=1), date, 0.1) is False


def test_the_servers_time_is_understood_without_a_name_of_its_zone() -> None:
    assert was_there_before(MOMENT - timedelta(days=1), DATE.replace("GMT", "-0000"), 0.1) is True


@pytest.mark.parametrize(
    "arn",
    [
        "",
        "orders",
        None,
        ARN.replace("stateMachine", "execution") + ":x",
        ARN.replace("states", "sqs"),
        f"{ARN}/label",
        f"{ARN}:1:2",
        f"{ARN} ",
    ],
)
def test_what_is_not_the_arn_of_a_state_machine_is_refused(arn: Any) -> None:
    with pytest.raises(InvalidConfiguration, match=r"Executions\.state_machine_arn must be the ARN"):
        Executions(arn)


@pytest.mark.parametrize("arn", [ARN, f"{ARN}:7", f"{ARN}:PROD", ARN.replace("aws", "aws-cn")])
def test_versions_aliases_and_other_partitions_are_state_machines(arn: str) -> None:
    assert repr(Executions(arn)) == f"Executions({arn!r})"


@pytest.mark.parametrize("body", [b"", b"text", b"NaN", b'{"a": Infinity}', b"\xff", b"[" * 100_000])
def test_a_body_that_is_not_json_needs_an_input(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        Executions(ARN).start(Message("m-1", body))


@pytest.mark.parametrize("value", [{1, 2}, object(), float("nan"), "\ud800"])
def test_an_input_that_json_cannot_say_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Executions(ARN).start(Message("m-1", b"{}"), input=value)


def test_an_input_that_is_too_large_is_refused_before_anything_is_called() -> None:
    body = b'"' + b"\xc3\xa9" * (MAX_INPUT_BYTES // 2) + b'"'
    with pytest.raises(MessageTooLarge) as error:
        Executions(ARN).start(Message("m-1", body))
    assert (error.value.size, error.value.limit) == (MAX_INPUT_BYTES + 2, MAX_INPUT_BYTES)
    assert str(error.value).startswith(f"{ARN} takes an input of at most 262,144 bytes, and this one has 262,146; ")
