"""The horizon: which messages are too old to judge whether they were processed."""

from txbox.horizon.age_judge import MIN_WINDOW, PRODUCER_SLACK, AgeJudge, UnknownAge

__all__ = ["MIN_WINDOW", "PRODUCER_SLACK", "AgeJudge", "UnknownAge"]
