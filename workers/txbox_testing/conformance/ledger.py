"""What every ledger must do: the suite of ``txbox.leases.Ledger``."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pytest

from txbox import InvalidConfiguration, InvalidMessageId, LeaseLost, Mismatch
from txbox.leases import Lease, LeaseState, Ledger
from txbox.leases.lease import AttemptEnd

__all__ = ["LedgerConformance", "LedgerStore"]

LONG = 600.0
ODD_IDS = ["a", "with blanks and 'quotes' \"%s\"", "größe/ünïcode/☃", "x" * 1_000, "#:?&=+", "🦆" * 250]


class LedgerStore(Protocol):
    """A test's own store of leases. It can also do what a ledger cannot: let time pass."""

    def ledger(self, subscriber: str = "mailing") -> Ledger:
        """Return a subscriber's ledger, a new client of the store each time."""

    def expire(self, message_id: str) -> None:
        """Let a message's lease run out."""


class LedgerConformance:
    """Subclass it, and override ``store``."""

    rounds = 5
    """How often 32 threads ask at once."""

    @pytest.fixture
    def store(self) -> LedgerStore:
        """Return a test's own store."""
        raise NotImplementedError

    @pytest.fixture
    def ledger(self, store: LedgerStore) -> Ledger:
        """Return one of the store's ledgers."""
        return store.ledger()

    def test_the_first_one_has_it_and_the_next_one_has_to_wait(self, ledger: Ledger) -> None:
        lease = acquired(ledger, "m", lease_seconds=LONG)
        assert (lease.subscriber_id, lease.message_id, lease.attempt, lease.unknown_attempts) == ("mailing", "m", 1, 0)
        assert LONG - 30 < lease.seconds_left <= LONG == lease.lease_seconds
        again = ledger.acquire("m")
        assert (again.state, again.lease, again.result) == (LeaseState.IN_FLIGHT, None, None)
        assert LONG - 30 < again.seconds_left < LONG + 10

    def test_what_is_completed_stays_completed_with_its_result(self, store: LedgerStore) -> None:
        ledger = store.ledger()
        for message_id, result in {"m": None, "n": b"", "o": b"null", "p": bytes(range(256))}.items():
            ledger.complete(acquired(ledger, message_id), result)
            store.expire(message_id)
            for other in (ledger, store.ledger()):
                again = other.acquire(message_id)
                assert (again.state, again.result, again.lease) == (LeaseState.COMPLETED, result, None)

    def test_what_is_released_is_free_at_once_and_the_attempt_is_known_to_have_failed(self, ledger: Ledger) -> None:
        first = acquired(ledger, "m", lease_seconds=LONG)
        ledger.release(first)
        second = acquired(ledger, "m", lease_seconds=LONG)
        assert (second.attempt, second.unknown_attempts) == (2, 0)
        assert second.fence > first.fence

    def test_a_release_may_say_that_the_effect_is_not_known(self, ledger: Ledger) -> None:
        ledger.release(acquired(ledger, "m"), AttemptEnd.UNKNOWN)
        ledger.release(acquired(ledger, "m"))
        third = acquired(ledger, "m")
        assert (third.attempt, third.unknown_attempts) == (3, 1)
        ledger.release(third, AttemptEnd.UNKNOWN, forget_attempts=True)
        fourth = acquired(ledger, "m")
        assert (fourth.attempt, fourth.unknown_attempts) == (1, 2)
        ledger.release(fourth)
        assert acquired(ledger, "m").unknown_attempts == 2

    def test_an_attempt_that_was_not_made_does_not_count(self, ledger: Ledger) -> None:
        ledger.release(acquired(ledger, "m"))
        for _ in range(3):
            lease = acquired(ledger, "m")
            assert (lease.attempt, lease.unknown_attempts) == (2, 0)
            ledger.release(lease, AttemptEnd.NOT_MADE)
            ledger.release(lease, AttemptEnd.NOT_MADE)
        assert acquired(ledger, "m").attempt == 2

    def test_an_attempt_that_an_outage_has_ended_is_told_and_does_not_count(self, store: LedgerStore) -> None:
        ledger = store.ledger()
        for before in range(3):
            lease = acquired(ledger, "m")
            assert (lease.attempt, lease.unknown_attempts) == (1, before)
            ledger.release(lease, AttemptEnd.NOT_COUNTED)
            ledger.release(lease, AttemptEnd.NOT_COUNTED)
        ledger.release(acquired(ledger, "m"))
        acquired(ledger, "m")
        store.expire("m")
        lease = acquired(ledger, "m")
        assert (lease.attempt, lease.unknown_attempts) == (3, 4), "one has failed, and of the next one nothing is known"
        ledger.release(lease, AttemptEnd.NOT_COUNTED, forget_attempts=True)
        lease = acquired(ledger, "m")
        assert (lease.attempt, lease.unknown_attempts) == (1, 5)
        ledger.complete(lease)

    def test_a_lease_that_ran_out_is_taken_over_and_the_late_owner_can_do_nothing(self, store: LedgerStore) -> None:
        late, ledger = store.ledger(), store.ledger()
        lost = acquired(late, "m", lease_seconds=LONG)
        store.expire("m")
        lease = acquired(ledger, "m", lease_seconds=LONG)
        assert (lease.attempt, lease.unknown_attempts) == (2, 1), "nobody knows how the first attempt ended"
        assert lease.fence > lost.fence
        for settle in (late.renew, late.complete, late.release):
            with pytest.raises(LeaseLost) as caught:
                settle(lost)
            assert (caught.value.message_id, caught.value.fence) == ("m", lost.fence)
        assert lost.lost
        assert lost.seconds_left == 0
        with pytest.raises(LeaseLost):
            lost.ensure()
        lease.ensure()
        assert ledger.acquire("m").state is LeaseState.IN_FLIGHT
        ledger.complete(lease, b"mine")
        with pytest.raises(LeaseLost):
            late.complete(lost, b"the late one's")
        assert ledger.acquire("m").result == b"mine"

    def test_a_lease_that_ran_out_and_that_nobody_took_over_can_still_be_completed(self, store: LedgerStore) -> None:
        ledger = store.ledger()
        lease = acquired(ledger, "m")
        store.expire("m")
        ledger.complete(lease, b"late, and in time")
        assert ledger.acquire("m").result == b"late, and in time"

    def test_a_renewal_keeps_others_out(self, store: LedgerStore) -> None:
        ledger = store.ledger()
        lease = acquired(ledger, "m", lease_seconds=LONG)
        store.expire("m")
        ledger.renew(lease)
        assert store.ledger().acquire("m").state is LeaseState.IN_FLIGHT
        ledger.renew(lease, lease_seconds=2 * LONG)
        assert lease.lease_seconds == 2 * LONG
        assert lease.seconds_left > LONG
        assert ledger.acquire("m").seconds_left > LONG + 60
        ledger.renew(lease, lease_seconds=60)
        assert ledger.acquire("m").seconds_left < 70, "a renewal may also be shorter"
        assert lease.seconds_left <= 60

    def test_the_same_owner_may_say_the_same_twice_as_answers_get_lost(self, ledger: Ledger) -> None:
        failed = acquired(ledger, "m")
        ledger.release(failed)
        ledger.release(failed)
        lease = acquired(ledger, "m")
        assert (lease.attempt, lease.unknown_attempts) == (2, 0), "one failure, released twice"
        ledger.complete(lease, b"first")
        ledger.complete(lease, b"second")
        assert ledger.acquire("m").result == b"first"

    @pytest.mark.parametrize("end", ["complete", "release"])
    def test_who_has_given_a_lease_up_can_do_nothing_with_it(self, ledger: Ledger, end: str) -> None:
        lease = acquired(ledger, "m", lease_seconds=LONG)
        getattr(ledger, end)(lease)
        assert lease.seconds_left == 0
        with pytest.raises(LeaseLost):
            lease.ensure()
        for settle in (ledger.renew, ledger.release if end == "complete" else ledger.complete):
            with pytest.raises(LeaseLost):
                settle(lease)
        after = ledger.acquire("m")
        if end == "complete":
            assert after.state is LeaseState.COMPLETED
        else:
            assert after.lease is not None
            assert after.lease.attempt == 2

    def test_forgotten_attempts_begin_anew(self, store: LedgerStore) -> None:
        ledger = store.ledger()
        fences = [acquired(ledger, "m").fence]
        store.expire("m")
        lease = acquired(ledger, "m")
        ledger.release(lease, forget_attempts=True)
        ledger.release(lease, forget_attempts=True)
        again = acquired(ledger, "m")
        assert (again.attempt, again.unknown_attempts) == (1, 1), "what nobody knows is not forgotten"
        assert [*fences, lease.fence, again.fence] == sorted({*fences, lease.fence, again.fence})

    @pytest.mark.parametrize("state", ["in flight", "completed", "free"])
    def test_another_payload_under_the_same_id_is_refused(self, store: LedgerStore, state: str) -> None:
        ledger = store.ledger()
        lease = acquired(ledger, "m", fingerprint=b"one")
        match state:
            case "completed":
                ledger.complete(lease)
            case "free":
                ledger.release(lease)
        for _ in range(2):
            with pytest.raises(Mismatch):
                ledger.acquire("m", fingerprint=b"other")
        expected = {"in flight": LeaseState.IN_FLIGHT, "completed": LeaseState.COMPLETED, "free": LeaseState.ACQUIRED}
        assert ledger.acquire("m", fingerprint=b"one").state is expected[state]

    def test_who_asks_for_no_fingerprint_compares_none_and_changes_none(self, ledger: Ledger) -> None:
        ledger.release(acquired(ledger, "m", fingerprint=b"one"))
        ledger.release(acquired(ledger, "m"))
        with pytest.raises(Mismatch):
            ledger.acquire("m", fingerprint=b"other")
        ledger.release(acquired(ledger, "n"))
        ledger.release(acquired(ledger, "n", fingerprint=b"one"))
        with pytest.raises(Mismatch):
            ledger.acquire("n", fingerprint=b"other")

    def test_each_subscriber_has_leases_of_its_own(self, store: LedgerStore) -> None:
        mailing, gifts = store.ledger("mailing"), store.ledger("gifts")
        ours, theirs = acquired(mailing, "m"), acquired(gifts, "m")
        mailing.complete(ours, b"mail")
        assert gifts.acquire("m").state is LeaseState.IN_FLIGHT
        gifts.release(theirs)
        assert acquired(gifts, "m").attempt == 2
        assert mailing.acquire("m").result == b"mail"

    def test_any_id_that_the_inbox_can_keep_is_an_id_here_and_any_other_is_refused(self, ledger: Ledger) -> None:
        for number, message_id in enumerate(ODD_IDS):
            lease = acquired(ledger, message_id)
            ledger.renew(lease)
            ledger.complete(lease, b"%d" % number)
        assert [ledger.acquire(message_id).result for message_id in ODD_IDS] == [b"%d" % n for n in range(len(ODD_IDS))]
        for message_id in ("", "a\0b", "x" * 1_001, "\ud800"):
            with pytest.raises(InvalidMessageId):
                ledger.acquire(message_id)

    def test_a_lease_has_a_length(self, ledger: Ledger) -> None:
        lease = acquired(ledger, "m")
        for seconds in (0, -1, float("nan"), float("inf"), 8 * 24 * 3600):
            with pytest.raises(InvalidConfiguration):
                ledger.acquire("another", lease_seconds=seconds)
            with pytest.raises(InvalidConfiguration):
                ledger.renew(lease, lease_seconds=seconds)
        assert acquired(ledger, "another").attempt == 1, "nothing was acquired"

    def test_a_ledger_that_can_be_used_says_nothing(self, ledger: Ledger) -> None:
        ledger.check()

    def test_of_32_who_ask_at_once_exactly_one_has_it(self, store: LedgerStore) -> None:
        ledgers = [store.ledger() for _ in range(32)]
        with ThreadPoolExecutor(32) as pool:
            for _ in range(self.rounds):
                found = states(pool, ledgers, str(uuid.uuid4()))
                assert found == [LeaseState.ACQUIRED] + [LeaseState.IN_FLIGHT] * 31

    @pytest.mark.parametrize("before", ["expired", "released"])
    def test_of_16_who_find_it_free_again_exactly_one_takes_it_over(self, store: LedgerStore, before: str) -> None:
        ledgers = [store.ledger() for _ in range(16)]
        with ThreadPoolExecutor(16) as pool:
            for number in range(5):
                lease = acquired(ledgers[0], f"m-{number}", lease_seconds=LONG)
                if before == "expired":
                    store.expire(f"m-{number}")
                else:
                    ledgers[0].release(lease)
                found = states(pool, ledgers, f"m-{number}")
                assert found == [LeaseState.ACQUIRED] + [LeaseState.IN_FLIGHT] * 15


def acquired(ledger: Ledger, message_id: str, **options: Any) -> Lease:
    """Acquire a message that is free, and return its lease."""
    acquisition = ledger.acquire(message_id, **options)
    assert acquisition.state is LeaseState.ACQUIRED, acquisition
    assert acquisition.lease is not None
    return acquisition.lease


def states(pool: ThreadPoolExecutor, ledgers: list[Ledger], message_id: str) -> list[LeaseState]:
    """Return the sorted states that these ledgers get when all of them ask at the same moment."""
    gate = threading.Barrier(len(ledgers))

    def ask(ledger: Ledger) -> LeaseState:
        gate.wait()
        return ledger.acquire(message_id, lease_seconds=LONG).state

    return sorted(pool.map(ask, ledgers))
