"""Leases: the right to work on a message whose effect no transaction covers, kept in Postgres or DynamoDB."""

from txbox.leases.idempotency import idempotent
from txbox.leases.lease import LEASE_SECONDS, Acquisition, Lease, LeaseState
from txbox.leases.ledger import Ledger
from txbox.leases.postgres_ledger import PostgresLedger

__all__ = ["LEASE_SECONDS", "Acquisition", "Lease", "LeaseState", "Ledger", "PostgresLedger", "idempotent"]
