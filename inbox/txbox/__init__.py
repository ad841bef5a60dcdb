"""Process every message exactly once in effect, with nothing but the Postgres you already have.

::

    inbox = Inbox("billing")

    def on_purchase(session, message):        # with a worker: the record is made for you
        ...

    with Session(engine) as session, session.begin():      # by hand: three lines
        if inbox.record(session, message_id):
            apply(session, purchase)

    outbox = Outbox()

    with Session(engine) as session, session.begin():      # the other way: what commits is sent, by a relay
        session.add(order)
        outbox.publish(session, queue_url, order.as_json(), key=order.customer)
"""

from typing import TYPE_CHECKING

from txbox.errors import (
    BrokerError,
    EffectFailed,
    EffectUnknown,
    EntityMissing,
    Expired,
    InFlight,
    InvalidConfiguration,
    InvalidMessageId,
    LeaseLost,
    LedgerError,
    LetterNotFound,
    MalformedMessage,
    MessageTooLarge,
    Mismatch,
    NotInTransaction,
    NotSendable,
    OperationNotFound,
    OutOfOrder,
    ResultNotStored,
    RightsMissing,
    SchemaMissing,
    StatementLeftOpen,
    TableLocked,
    TransactionAborted,
    TransactionEnded,
    TransactionTimedOut,
    TxboxError,
)
from txbox.lazy_names import lazy_names
from txbox.messages.message import Identify, Message, identify
from txbox.outcome import Outcome

if TYPE_CHECKING:
    from txbox.coroutines import AsyncInbox, AsyncOutbox
    from txbox.dead_letters import DeadLetter, DeadLetters, Reason
    from txbox.dead_letters.failures import Failures
    from txbox.effects import SqlEffect
    from txbox.inbox.inbox import Inbox, Recorded
    from txbox.leases.idempotency import idempotent
    from txbox.outbox.outbox import Outbox, Outgoing
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "AsyncInbox": "txbox.coroutines",
            "AsyncOutbox": "txbox.coroutines",
            "DeadLetter": "txbox.dead_letters.letter",
            "DeadLetters": "txbox.dead_letters.dead_letters",
            "Failures": "txbox.dead_letters.failures",
            "Inbox": "txbox.inbox.inbox",
            "Outbox": "txbox.outbox.outbox",
            "Outgoing": "txbox.outbox.outbox",
            "Reason": "txbox.dead_letters.letter",
            "Recorded": "txbox.inbox.inbox",
            "SqlEffect": "txbox.effects.sql_effect",
            "idempotent": "txbox.leases.idempotency",
        },
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncInbox",
    "AsyncOutbox",
    "BrokerError",
    "DeadLetter",
    "DeadLetters",
    "EffectFailed",
    "EffectUnknown",
    "EntityMissing",
    "Expired",
    "Failures",
    "Identify",
    "InFlight",
    "Inbox",
    "InvalidConfiguration",
    "InvalidMessageId",
    "LeaseLost",
    "LedgerError",
    "LetterNotFound",
    "MalformedMessage",
    "Message",
    "MessageTooLarge",
    "Mismatch",
    "NotInTransaction",
    "NotSendable",
    "OperationNotFound",
    "OutOfOrder",
    "Outbox",
    "Outcome",
    "Outgoing",
    "Reason",
    "Recorded",
    "ResultNotStored",
    "RightsMissing",
    "SchemaMissing",
    "SqlEffect",
    "StatementLeftOpen",
    "TableLocked",
    "TransactionAborted",
    "TransactionEnded",
    "TransactionTimedOut",
    "TxboxError",
    "idempotent",
    "identify",
]
