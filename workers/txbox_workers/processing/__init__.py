"""Processing: the way of a delivery from the worker to its handler, and to its outcome.

::

    worker ─→ processor              order within a batch, repeats, groups
                ├─ inbox_processor       attempts are counted in the database; parking
                └─ ledger_processor      each message under a lease; parking
                     └─ handler_transactions    a redelivery is recognised here: record, then the handler
                          ├─ deadlocks              conflicts: run again, and avoided when there are many
                          └─ guarded_transactions   begin, hand out, commit; only the worker commits
"""

from txbox_workers.options import ValidOptions
from txbox_workers.processing.inbox_processor import InboxProcessor
from txbox_workers.processing.ledger_processor import LedgerProcessor
from txbox_workers.processing.outage_errors import DatabaseUnavailable, is_cancellation
from txbox_workers.processing.processor import Processor, ProcessorContext

__all__ = ["DatabaseUnavailable", "Processor", "ProcessorContext", "is_cancellation", "make_processor"]


def make_processor(options: ValidOptions, context: ProcessorContext) -> Processor:
    """Return the processor that a worker or a Lambda function needs."""
    return InboxProcessor(options, context) if options.ledger is None else LedgerProcessor(options, context)
