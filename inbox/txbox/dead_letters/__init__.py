"""Dead letters: messages parked after their last attempt, and the failed attempts that lead there."""

from txbox.dead_letters.dead_letters import DeadLetters
from txbox.dead_letters.failures import Failures
from txbox.dead_letters.letter import DeadLetter, Reason

__all__ = ["DeadLetter", "DeadLetters", "Failures", "Reason"]
