"""Whatever owners do, in whatever order, a ledger does what a model of a few lines does."""

import contextlib
import itertools
import uuid
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from support.txbox.leases import Store
from txbox import LeaseLost, Mismatch
from txbox.leases import Lease, LeaseState
from txbox.leases.lease import AttemptEnd

LONG = 3_600.0
EXAMPLES = {"postgres": 40, "dynamodb": 8}
OWNERS = (0, 1, 2)


@dataclass
class Model:
    """What there is to know of one message: written from the rules alone, without a look at any ledger."""

    fences: list[int] = field(default_factory=list)
    held: bool = False  # somebody has the newest lease
    over: bool = False  # and it has run out
    completed: bool = False
    result: bytes | None = None
    fingerprint: bytes | None = None
    attempts: int = 0
    failed: int = 0
    unknown_before: int = 0
    completions: set[int] = field(default_factory=set)

    def is_free(self) -> bool:
        return not self.completed and (not self.held or self.over)

    def is_newest(self, lease: Lease) -> bool:
        return lease.fence == self.fences[-1]


class LeaseMachine(RuleBasedStateMachine):
    """Three owners, each a client of its own, and one message: the more often they meet at it."""

    leases: Bundle[Lease] = Bundle("leases")

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.owners = [store.ledger() for _ in OWNERS]
        self.model = Model()
        self.given: list[Lease] = []
        self.message_id = f"m-{uuid.uuid4()}"  # of its own for each example: the table is never emptied

    @rule(target=leases, owner=st.sampled_from(OWNERS), fingerprint=st.sampled_from([None, b"one", b"other"]))
    def acquire(self, owner: int, fingerprint: bytes | None) -> object:
        return self._acquire(owner, fingerprint)

    @rule(target=leases, owner=st.sampled_from(OWNERS))
    def take_over(self, owner: int) -> object:
        # In one step, as that is what most of it is about, and by chance it comes about seldom.
        self.run_out()
        return self._acquire(owner, None)

    def _acquire(self, owner: int, fingerprint: bytes | None) -> object:
        message_id, model = self.message_id, self.model
        if fingerprint and model.fingerprint and fingerprint != model.fingerprint:
            with pytest.raises(Mismatch):
                self.owners[owner].acquire(message_id, lease_seconds=LONG, fingerprint=fingerprint)
            return multiple()
        answer = self.owners[owner].acquire(message_id, lease_seconds=LONG, fingerprint=fingerprint)
        if model.completed:
            assert (answer.state, answer.result, answer.lease) == (LeaseState.COMPLETED, model.result, None)
            return multiple()
        if not model.is_free():
            assert (answer.state, answer.result, answer.lease) == (LeaseState.IN_FLIGHT, None, None)
            assert 0 < answer.seconds_left < LONG + 10
            return multiple()
        assert answer.state is LeaseState.ACQUIRED
        lease = answer.lease
        assert lease is not None
        assert lease.fence > max(model.fences, default=-1)
        assert (lease.attempt, lease.unknown_attempts) == (
            model.attempts + 1,
            model.attempts - model.failed + model.unknown_before,
        )
        model.fences.append(lease.fence)
        model.attempts += 1
        model.held, model.over = True, False
        model.fingerprint = model.fingerprint or fingerprint
        self.given.append(lease)
        return lease

    @rule()
    def run_out(self) -> None:
        self.store.expire(self.message_id)
        self.model.over = True

    @rule(lease=leases, owner=st.sampled_from(OWNERS))
    def renew(self, lease: Lease, owner: int) -> None:
        model = self.model
        if model.is_newest(lease) and model.held:
            self.owners[owner].renew(lease)
            model.over = False
            assert not lease.lost
            assert lease.seconds_left > 0
        else:
            with pytest.raises(LeaseLost):
                self.owners[owner].renew(lease)
            assert lease.lost
            assert lease.seconds_left == 0

    @rule(lease=leases, owner=st.sampled_from(OWNERS), result=st.sampled_from([None, b"", b"one", b"other"]))
    def complete(self, lease: Lease, owner: int, result: bytes | None) -> None:
        model = self.model
        if model.is_newest(lease) and (model.held or model.completed):
            self.owners[owner].complete(lease, result)
            if not model.completed:
                model.completed, model.held, model.result = True, False, result
            model.completions.add(lease.fence)
        else:
            with pytest.raises(LeaseLost):
                self.owners[owner].complete(lease, result)

    @rule(
        lease=leases,
        owner=st.sampled_from(OWNERS),
        how=st.sampled_from(AttemptEnd),
        forget=st.sampled_from([False, False, True]),
    )
    def release(self, lease: Lease, owner: int, how: AttemptEnd, forget: bool) -> None:
        self._release(lease, owner, how, forget)

    @rule(lease=consumes(leases), owner=st.sampled_from(OWNERS))
    def release_and_go(self, lease: Lease, owner: int) -> None:
        self._release(lease, owner, AttemptEnd.FAILED, forget=False)

    def _release(self, lease: Lease, owner: int, how: AttemptEnd, forget: bool) -> None:
        model = self.model
        if model.is_newest(lease) and not model.completed:
            self.owners[owner].release(lease, how, forget_attempts=forget)
            model.failed += model.held and how is AttemptEnd.FAILED
            model.attempts -= model.held and how in (AttemptEnd.NOT_MADE, AttemptEnd.NOT_COUNTED)
            model.unknown_before += model.held and how is AttemptEnd.NOT_COUNTED
            model.held = False
            if forget:
                model.attempts = model.failed = 0
                model.unknown_before = lease.unknown_attempts + (how in (AttemptEnd.UNKNOWN, AttemptEnd.NOT_COUNTED))
        else:
            with pytest.raises(LeaseLost):
                self.owners[owner].release(lease, how, forget_attempts=forget)

    @invariant()
    def fences_grow_and_one_lease_completes(self) -> None:
        assert all(earlier < later for earlier, later in itertools.pairwise(self.model.fences))
        assert len(self.model.completions) <= 1

    def teardown(self) -> None:
        """In the end: one owner at most, and what is completed is completed for everybody."""
        owned = []
        for lease in self.given:
            with contextlib.suppress(LeaseLost):
                self.owners[0].renew(lease)
                owned.append(lease.fence)
        assert owned == (self.model.fences[-1:] if self.model.held else [])
        if self.model.completed:
            for owner in self.owners:
                answer = owner.acquire(self.message_id)
                assert (answer.state, answer.result) == (LeaseState.COMPLETED, self.model.result)


def test_a_ledger_does_what_the_model_does(store: Store) -> None:
    campaign(store, EXAMPLES[store.name])


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_a_ledger_does_what_the_model_does_for_long(store: Store) -> None:
    campaign(store, 100 * EXAMPLES[store.name])


def campaign(store: Store, examples: int) -> None:
    # A store is no function: a lease has its own clock, so no deadline; and pytest's fixture is the same throughout.
    options = settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: LeaseMachine(store), settings=options)
