"""Processing: take a delivery from the worker to its handler and to its outcome.

::

    worker ─→ processor              order within a batch, repeats, groups
                ├─ inbox_processor       counts attempts in the database; parks
                └─ ledger_processor      runs each message under a lease; parks
                     └─ handler_transactions    recognises a redelivery: record, then the handler
                          ├─ deadlocks              runs conflicts again, and avoids them when there are many
                          └─ guarded_transactions   begin, hand out, commit; only the worker commits
"""

from txbox_workers.options import ValidOptions
from txbox_workers.processing.inbox_processor import InboxProcessor
from txbox_workers.processing.ledger_processor import LedgerProcessor
from txbox_workers.processing.outage_errors import DatabaseUnavailable, is_cancellation
from txbox_workers.processing.processor import Processor, ProcessorContext

__all__ = ["DatabaseUnavailable", "Processor", "ProcessorContext", "is_cancellation", "make_processor"]


def make_processor(options: ValidOptions, context: ProcessorContext) -> Processor:
    return InboxProcessor(options, context) if options.ledger is None else LedgerProcessor(options, context)
