"""Decide whose fault it is when AWS refuses a call or an entry. Pure, no I/O.

================  =============================================  ================================================
fault             for example                                    what follows
================  =============================================  ================================================
``BROKER``        throttled, 5xx, no answer                      no message is to blame: sent again after a pause
``DESTINATION``   no such queue, access denied, key disabled     no message is to blame: sent again after a pause
``ENTRY``         too long, invalid parameter, malformed         the message is refused
``ENTRY``         an internal error with this entry alone        refused too, but it is no attempt: not counted
================  =============================================  ================================================

An entry that is throttled, or lacks a permission, is not refused either. Refusals are counted, so a message would
become a dead letter because its queue was busy or a policy had been edited.
"""

from enum import Enum

from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError
from botocore.parsers import ResponseParserError

from txbox_aws.clients import code_of

CALL_ERRORS = (BotoCoreError, ClientError, ResponseParserError)
"""The errors of a call that fails as a whole."""


class Blame(Enum):
    BROKER = "broker"
    DESTINATION = "destination"
    ENTRY = "entry"


def fault_of(error: Exception) -> Blame:
    """Return whose fault it is that a whole call failed with one of ``CALL_ERRORS``."""
    if not isinstance(error, ClientError):
        return Blame.ENTRY if isinstance(error, ParamValidationError) else Blame.BROKER
    name = _plain(code_of(error))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status >= 500 or status == 429 or _is_throttle(name) or name in _PASSING:
        return Blame.BROKER
    if status == 413 or name in _ENTRIES:
        return Blame.ENTRY
    return Blame.DESTINATION


def of_entry(code: str) -> Blame:
    """Return whose fault it is that one entry was refused with this code."""
    name = _plain(code)
    if _is_throttle(name):
        return Blame.BROKER
    if name.upper().startswith("KMS") or name in _DESTINATIONS:
        return Blame.DESTINATION
    return Blame.ENTRY


def is_final(code: str, *, sender_fault: bool | None) -> bool:
    """Whether an entry was refused through its own fault and sending it again cannot help.

    The code is the entry's, or the call's if it had no other entry. ``sender_fault`` is what the answer says about the
    entry; None if it says nothing, as with EventBridge and with the error of a call. Then it is final if only a message
    itself can cause the code: an invalid parameter may be the destination's setting, which can be corrected.
    """
    name = _plain(code)
    return name in _MESSAGES if sender_fault is None else sender_fault and name not in _PASSING


def is_counted(code: str, *, sender_fault: bool | None) -> bool:
    """Whether the refusal of an entry counts as an attempt: not if the broker says that it has failed itself.

    The arguments are those of ``is_final``.
    """
    name = _plain(code)
    return name not in _PASSING and (sender_fault is not False or name in _ENTRIES)


def _plain(code: str) -> str:
    """Remove what one service adds to a code and another does not."""
    return code.removeprefix("AWS.SimpleQueueService.").removesuffix("Exception")


def _is_throttle(name: str) -> bool:
    return "throttl" in name.lower() or name in _THROTTLES


_THROTTLES = {
    "TooManyRequests",
    "RequestLimitExceeded",
    "LimitExceeded",
    "OverLimit",
    "SlowDown",
    "BandwidthLimitExceeded",
}
_PASSING = {
    "Internal",
    "InternalError",
    "InternalFailure",
    "InternalServerError",
    "InternalService",
    "RequestTimeout",
    "ServiceFailure",
    "ServiceUnavailable",
    "Unavailable",
}
_DESTINATIONS = {
    "AccessDenied",
    "AuthorizationError",
    "InvalidAccountId",
    "InvalidSecurity",
    "NonExistentQueue",
    "NotFound",
    "QueueDoesNotExist",
    "ResourceNotFound",
}
_MESSAGES = {
    "413",
    "BatchRequestTooLong",
    "InvalidArgument",
    "InvalidMessageContents",
    "MalformedDetail",
    "ParamValidationError",
    "RequestEntityTooLarge",
}
_ENTRIES = _MESSAGES | {
    "InvalidAttributeValue",
    "InvalidBatchEntryId",
    "InvalidParameter",
    "InvalidParameterCombination",
    "InvalidParameterValue",
    "MissingParameter",
    "ParameterValueInvalid",
    "Serialization",
    "Validation",
    "ValidationError",
}
