"""Both ledgers keep the promises of the port."""

import pytest

from support.txbox.leases import Store
from txbox_testing.conformance.ledger import LedgerConformance


class TestLedgers(LedgerConformance):
    @pytest.fixture
    def store(self, store: Store) -> Store:
        return store

    @pytest.mark.slow
    @pytest.mark.timeout(1_800)
    def test_of_32_who_ask_at_once_exactly_one_has_it_a_thousand_times(self, store: Store) -> None:
        self.rounds = 1_000
        self.test_of_32_who_ask_at_once_exactly_one_has_it(store)
