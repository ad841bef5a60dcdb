"""Ledgers: leases for effects that no transaction covers. In Postgres, or in DynamoDB (``txbox.ledgers.dynamodb``)."""

from txbox.ledgers.lease import LEASE_SECONDS, Acquisition, Lease, LeaseState
from txbox.ledgers.ledger import Ledger
from txbox.ledgers.postgres import PostgresLedger

__all__ = ["LEASE_SECONDS", "Acquisition", "Lease", "LeaseState", "Ledger", "PostgresLedger"]
