"""Dead letters: messages parked after their last attempt, what is done with them, and the failed attempts before."""

from txbox.dead_letters.dead_letters import DeadLetters
from txbox.dead_letters.failures import Failures
from txbox.dead_letters.letter import DeadLetter, Reason
from txbox.dead_letters.letter_filter import LetterFilter
from txbox.dead_letters.letter_operation import (
    HeldKey,
    LetterCount,
    LetterOperation,
    LetterOutcome,
    LetterResult,
    OperationKind,
)
from txbox.dead_letters.letter_operations import LetterOperations

__all__ = [
    "DeadLetter",
    "DeadLetters",
    "Failures",
    "HeldKey",
    "LetterCount",
    "LetterFilter",
    "LetterOperation",
    "LetterOperations",
    "LetterOutcome",
    "LetterResult",
    "OperationKind",
    "Reason",
]
