"""Dead letters: messages parked after their last attempt, and the failed attempts that lead there."""

from txbox.dead_letters.dead_letters import DeadLetter, DeadLetters, Reason
from txbox.dead_letters.failures import Failures

__all__ = ["DeadLetter", "DeadLetters", "Failures", "Reason"]
