"""Read the answers of SQS, SNS and EventBridge: which entries were sent. Pure, no I/O.

Only what is confirmed counts as sent. An entry that an answer does not mention is refused. An answer in which boto3
recognises nothing, such as a proxy's page with status 200, is no answer, and no message is to blame.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from txbox import BrokerError
from txbox.relay import OutboxMessage, Refused
from txbox_aws.publishers.calls import Entry, PublishCall
from txbox_aws.publishers.faults import Blame, is_counted, is_final, of_entry

Unlike = Callable[[Entry, Mapping[str, Any]], str | None]
"""Returns how a confirmed entry differs from the one that was sent; None if it does not."""


def _in_nothing(_entry: Entry, _confirmed: Mapping[str, Any]) -> None:
    return None


@dataclass(slots=True)
class PublishResult:
    """The results of entries. Those that do not appear in it were sent."""

    refused: list[Refused] = field(default_factory=list)  # through their own fault, or by chance
    unsent: list[OutboxMessage] = field(default_factory=list)  # through no fault of theirs; to be sent again
    error: BrokerError | None = None  # why some are unsent

    def add(self, other: "PublishResult") -> None:
        """Add the results of other entries."""
        self.refused += other.refused
        self.unsent += other.unsent
        if self.error is None or (other.error is not None and self.error.permanent and not other.error.permanent):
            self.error = other.error

    def add_failed(self, entry: Entry, code: str, text: str, *, sender_fault: bool | None) -> None:
        """Add an entry that failed according to the answer."""
        destination = entry.message.destination
        why = f"{destination} refused the message: {code} {text}".strip()
        fault = of_entry(code)
        if fault is Blame.ENTRY:
            final, counted = is_final(code, sender_fault=sender_fault), is_counted(code, sender_fault=sender_fault)
            self.refused.append(Refused(entry.message, why, final=final, counted=counted))
        else:
            self.unsent.append(entry.message)
            self.error = self.error or BrokerError(why, permanent=fault is Blame.DESTINATION)


def refusal(entry: Entry, why: str, *, final: bool = False) -> Refused:
    return Refused(entry.message, f"{entry.message.destination} {why}", final=final)


def result_by_ids(call: PublishCall, answer: Mapping[str, Any], unlike: Unlike = _in_nothing) -> PublishResult:
    """Read the answer of SQS or SNS, in which each entry has the id that it was given: its place in the call.

    ``unlike`` checks a confirmed entry.
    """
    if "Successful" not in answer and "Failed" not in answer:
        return _no_answer(call)
    result = PublishResult()
    successful = _by_id(answer.get("Successful"))
    failed = _by_id(answer.get("Failed"))
    for number, entry in enumerate(call.entries):
        if (failure := failed.get(str(number))) is not None:
            result.add_failed(
                entry,
                str(failure.get("Code", "")),
                str(failure.get("Message", "")),
                sender_fault=bool(failure.get("SenderFault")),
            )
        elif (confirmed := successful.get(str(number))) is None:
            result.refused.append(refusal(entry, _UNMENTIONED))
        elif (difference := unlike(entry, confirmed)) is not None:
            result.refused.append(refusal(entry, f"has taken something else than was sent: {difference}"))
    return result


def result_in_order(call: PublishCall, answer: Mapping[str, Any]) -> PublishResult:
    """Read the answer of EventBridge, which has an entry for each one that was sent, in the same order."""
    if "Entries" not in answer:
        return _no_answer(call)
    result = PublishResult()
    entries: Sequence[Mapping[str, Any]] = answer["Entries"]
    for number, entry in enumerate(call.entries):
        one = entries[number] if number < len(entries) else {}
        if one.get("ErrorCode"):
            result.add_failed(entry, str(one["ErrorCode"]), str(one.get("ErrorMessage", "")), sender_fault=None)
        elif not one.get("EventId"):
            result.refused.append(refusal(entry, _UNMENTIONED))
    return result


def _no_answer(call: PublishCall) -> PublishResult:
    error = BrokerError(f"{call.destination} gave an answer that cannot be read")
    return PublishResult(unsent=call.messages, error=error)


def _by_id(entries: Iterable[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    return {str(one.get("Id")): one for one in entries or ()}


_UNMENTIONED = "has not mentioned the message in its answer; whether it arrived is not known"
