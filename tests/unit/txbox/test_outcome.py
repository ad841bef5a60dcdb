"""Which outcomes let the broker forget a delivery."""

from txbox import Outcome


def test_the_words_are_those_of_the_glossary() -> None:
    assert {str(outcome) for outcome in Outcome} == {
        "processed",
        "duplicate",
        "in_flight",
        "failed",
        "dead",
        "mismatch",
        "expired",
    }


def test_only_what_may_still_be_done_is_handed_back() -> None:
    assert {outcome for outcome in Outcome if not outcome.acked} == {Outcome.IN_FLIGHT, Outcome.FAILED}
