"""Letters that are sent through again, and a worker that is quicker than the redrive."""

import pytest
from sqlalchemy import Engine

from support.business import Business
from support.events import Kept
from support.handlers import failing_always
from support.memory_worker import at_work, make, messages
from support.waiting import wait_until
from txbox import DeadLetter, DeadLetters, Outcome
from txbox_workers.memory import MemorySource

pytestmark = pytest.mark.usefixtures("short_pauses")


def test_a_copy_that_fails_before_its_redrive_has_committed_is_not_acked_for_the_letter_it_came_from(
    engine: Engine, business: Business
) -> None:
    letters, kept, source = DeadLetters(engine), Kept(), MemorySource(messages("a"))
    with at_work(make(source, engine, failing_always, max_attempts=2, hooks=[kept])):
        assert source.wait_until_empty(20)
        (parked,) = letters.list()

        def send(_: DeadLetter) -> None:
            before = len(kept.outcomes("a"))
            source.send(messages("a")[0])
            wait_until(lambda: len(kept.outcomes("a")) > before, "dealt with while the letter is locked and not marked")

        letters.redrive(parked.dead_letter_id, send)
        assert source.wait_until_empty(20)
    told = [outcome for outcome in kept.outcomes("a") if outcome is not Outcome.IN_FLIGHT]
    assert told == [Outcome.FAILED, Outcome.DEAD] * 2
    assert kept.outcomes("a")[2] is Outcome.IN_FLIGHT, "it waits for the redrive"
    (waiting,) = letters.list()
    assert waiting.dead_letter_id > parked.dead_letter_id
    assert business.applied() == {}
