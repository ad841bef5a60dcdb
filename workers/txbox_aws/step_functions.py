"""Start a Step Functions execution once per message: the execution is named after the message.

The name is the lock. A state machine of type STANDARD never has two executions of one name, and AWS keeps a name for 90
days after its execution has ended. A message that comes again, to whichever worker or Lambda function, finds that
execution. Nothing is stored here.

What StartExecution answers, and what that becomes::

    name is new                             200, the new execution        PROCESSED
    name and input of a running execution   200, the one that is there    DUPLICATE, see below
    ended, or another input                 400 ExecutionAlreadyExists    DescribeExecution: the same input as a JSON
                                                                          value: DUPLICATE, another one: Mismatch

The two answers 200 differ only in their start date, so it is compared with the server's own time. This call began no
earlier than the answer's Date header minus the call's duration on a monotonic clock. An execution that started before
that is not this call's. The header has whole seconds, and the clocks of two servers may differ a little: **a duplicate
that comes within about two seconds of the first start may be reported as PROCESSED**. Only the report is wrong then;
there is still one execution. No wall clock of this machine is used.

How the execution ended does not matter: one that failed is a duplicate too, and is redriven in Step Functions.

Workflows of type EXPRESS do not know their names: every call starts another one. They are refused.

https://docs.aws.amazon.com/step-functions/latest/apireference/API_StartExecution.html
"""

import hashlib
import json
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from txbox import InvalidConfiguration, MalformedMessage, Message, MessageTooLarge, Mismatch, Outcome, TxboxError
from txbox.messages.message import valid_message_id
from txbox_aws.clients import STEP_FUNCTIONS, RegionalClients, stepfunctions_client, translated

if TYPE_CHECKING:
    from types_boto3_stepfunctions import SFNClient

__all__ = ["MAX_INPUT_BYTES", "Execution", "Executions", "execution_name", "stepfunctions_client"]

MAX_INPUT_BYTES = 256 * 1024
"""The limit of an execution's input, in UTF-8."""

CLOCK_SECONDS = 1.0
"""How much the clocks of two AWS servers may differ; a duplicate is recognised only beyond that."""

_NOT_GIVEN: Any = object()

_Error = TypeVar("_Error", bound=TxboxError)


@dataclass(frozen=True, slots=True)
class Execution:
    """The execution of a message.

    Attributes:
        arn: its ARN.
        outcome: PROCESSED if this call has started it. DUPLICATE if it existed before, or has ended since a first try
            of this call whose answer was lost.
    """

    arn: str
    outcome: Outcome


class Executions:
    """The executions of one state machine, one for each message.

    ::

        orders = Executions("arn:aws:states:eu-central-1:123456789012:stateMachine:orders")

        def on_order(session, message):
            orders.start(message)

    It needs the rights states:StartExecution, states:DescribeExecution and states:DescribeStateMachine.
    """

    def __init__(self, state_machine_arn: str, *, client: "SFNClient | None" = None) -> None:
        """Name the state machine; do not connect before the first ``start``.

        Args:
            state_machine_arn: the ARN of a state machine of type STANDARD, or of one of its versions or aliases. Names
                belong to the state machine: a message that was started in one version is a duplicate in every other.
            client: a Step Functions client of boto3 to use; None makes one from boto3's own settings.

        Raises:
            InvalidConfiguration: it is not the ARN of a state machine.
        """
        found = _STATE_MACHINE.fullmatch(state_machine_arn) if isinstance(state_machine_arn, str) else None
        if found is None:
            raise InvalidConfiguration(
                f"Executions.state_machine_arn must be the ARN of a state machine, not {state_machine_arn!r}"
            )
        self.state_machine_arn = state_machine_arn
        self._unqualified_arn = found["unqualified"]
        self._name = found["name"]
        self._executions_arn = f"{found['account']}:execution:{self._name}"
        self._region = found["region"]
        self._clients = RegionalClients(STEP_FUNCTIONS, client)
        self._is_standard = False

    def __repr__(self) -> str:
        return f"Executions({self.state_machine_arn!r})"

    def start(self, message: Message, *, input: Any = _NOT_GIVEN, name: str | None = None) -> Execution:  # noqa: A002 - AWS's word
        """Start the execution of a message, or find the one that was started before.

        In a handler, the execution is not part of the database's transaction: it runs even if the transaction is rolled
        back afterwards, and the message's next delivery finds it. Make it the last thing that a handler does.

        Args:
            message: the message to start it for.
            input: the execution's input, a JSON-serialisable value. It must be the same for every delivery of the
                message, so it has no times, random numbers or headers of a delivery. Without it, the input is the
                message's body, which must then be JSON.
            name: what to name the execution after instead of the message's id, if a message starts several:
                ``f"{message.id} refund"``.

        Returns:
            The execution's ARN, and whether this call has started it.

        Raises:
            Mismatch: an execution of this name has another input; ``subscriber_id`` is the state machine's name. A
                worker parks the message.
            MessageTooLarge: the input has more than 256 KiB.
            MalformedMessage: the body is not JSON, and no input was given.
            InvalidMessageId: the name is empty, too long or not text.
            TypeError, ValueError: the input is not JSON-serialisable.
            InvalidConfiguration: the state machine is of type EXPRESS.
            BrokerError: Step Functions could not be reached, or refused the call.
        """
        text = _body(message) if input is _NOT_GIVEN else _text(input)
        size = len(text.encode())
        if size > MAX_INPUT_BYTES:
            raise _reworded(
                MessageTooLarge(self.state_machine_arn, size, MAX_INPUT_BYTES),
                f"{self.state_machine_arn} takes an input of at most {MAX_INPUT_BYTES:,} bytes, and this one has "
                f"{size:,}; put the content into a store, and give where it is as the input",
            )
        named = execution_name(message.id if name is None else name)
        with translated(STEP_FUNCTIONS, self.state_machine_arn):
            client: SFNClient = self._clients.of(self._region)
            self._see_that_it_is_standard(client)
            begun = time.monotonic()
            try:
                answer = client.start_execution(stateMachineArn=self.state_machine_arn, name=named, input=text)
            except client.exceptions.ExecutionAlreadyExists:
                arn = f"{self._executions_arn}:{named}"
                before = client.describe_execution(executionArn=arn).get("input") or "{}"
                if not same_json(before, text):
                    raise _reworded(
                        Mismatch(self._name, (message.id,)),
                        f"the execution {named} of {self._name} began with another input; let the input be the same "
                        "for every delivery of a message, or give name= where a message starts several executions",
                    ) from None
                return Execution(arn, Outcome.DUPLICATE)
        date = answer["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
        earlier = was_there_before(answer["startDate"], date, time.monotonic() - begun)
        return Execution(answer["executionArn"], Outcome.DUPLICATE if earlier else Outcome.PROCESSED)

    def close(self) -> None:
        """Close the client's connections, if the client was made here."""
        self._clients.close()

    def _see_that_it_is_standard(self, client: "SFNClient") -> None:
        """Raise if the state machine would start an execution for every delivery. Its type never changes."""
        if self._is_standard:
            return
        kind = client.describe_state_machine(stateMachineArn=self._unqualified_arn)["type"]
        if kind != "STANDARD":
            raise InvalidConfiguration(
                f"Executions.state_machine_arn must be that of a state machine of type STANDARD; {self._name} is of "
                f"type {kind}, which starts an execution for every delivery"
            )
        self._is_standard = True


def execution_name(message_id: str) -> str:
    """Return the name of a message's execution: the id itself, if it can be a name.

    Otherwise the name is the readable part of the id and its SHA-256. Two ids never have the same name: an id that
    looks like such a name is not used as it is.

    Args:
        message_id: the id, 1 to 1,000 bytes.

    Returns:
        1 to 80 ASCII characters that CloudWatch also accepts.

    Raises:
        InvalidMessageId: the id is empty, too long or not text.
    """
    if _NAME.fullmatch(valid_message_id(message_id)) and not _DERIVED.search(message_id):
        return message_id
    readable = re.sub(r"[^A-Za-z0-9]+", "-", message_id).strip("-")[:_READABLE] or "message"
    return f"{readable}-{hashlib.sha256(message_id.encode()).hexdigest()}"


def same_json(one: str, other: str) -> bool:
    """Return whether two texts are the same JSON value, whatever the order of keys, blanks and spelling of numbers."""
    return one == other or _parsed(one) == _parsed(other)


def was_there_before(started: datetime, date: str | None, call_seconds: float) -> bool:
    """Return whether an execution existed before the call that was answered with it.

    ::

        call begins ───────── answer made (Date, cut to whole seconds) ── answer here
        └───────────────────── call_seconds ───────────────────────────┘

    The call began no earlier than ``call_seconds`` before the answer was made. So an execution that started before
    that, by more than clocks may differ, belongs to another call.

    Args:
        started: the execution's start, by the server's clock.
        date: the answer's Date header, by the server's clock.
        call_seconds: how long the call took, by a monotonic clock.
    """
    try:
        answered = parsedate_to_datetime(date or "")
    except ValueError:
        return False
    answered = answered.replace(tzinfo=UTC)  # a Date header is always in UTC, whatever it says
    return started < answered - timedelta(seconds=call_seconds + CLOCK_SECONDS)


def _reworded(error: _Error, text: str) -> _Error:
    """Replace an error's text, which is about the bodies of messages and their headers, by one about executions."""
    error.args = (text,)
    return error


def _body(message: Message) -> str:
    text = message.text
    try:
        # No state machine takes what is not JSON, such as NaN.
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(
            f"the body of message {message.id} is not JSON, so it cannot be an execution's input: {error}; "
            "give the input yourself"
        ) from error
    return text


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _parsed(text: str) -> Any:
    return json.loads(text, parse_int=_number, parse_float=_number)


def _number(text: str) -> tuple[str, Decimal]:
    # Not a bare number: to Python, 1 and true are equal.
    return "number", Decimal(text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_STATE_MACHINE = re.compile(
    r"(?P<unqualified>(?P<account>arn:[^:]+:states:(?P<region>[^:]+):[^:]+):stateMachine:(?P<name>[^:/\s]+))(?::[^:/\s]+)?"
)
_NAME = re.compile(r"[A-Za-z0-9!'()+\-.=@_]{1,80}")
_DERIVED = re.compile(r"-[0-9a-f]{64}\Z")
_READABLE = 80 - 1 - 64
