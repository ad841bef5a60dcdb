"""Process every message exactly once in effect, with nothing but the Postgres you already have.

::

    inbox = Inbox("billing")

    def on_purchase(session, message):        # with a worker: the record is made for you
        ...

    with Session(engine) as session, session.begin():      # by hand: three lines
        if inbox.record(session, message_id):
            apply(session, purchase)
"""

from txbox.dead_letters import DeadLetter, DeadLetters, Reason
from txbox.errors import (
    BrokerError,
    InFlight,
    InvalidConfiguration,
    InvalidMessageId,
    LetterNotFound,
    MalformedMessage,
    Mismatch,
    NotInTransaction,
    SchemaMissing,
    TransactionAborted,
    TransactionEnded,
    TxboxError,
)
from txbox.failures import Failures
from txbox.inbox import Inbox, Recorded
from txbox.message import Identify, Message, identify
from txbox.outcome import Outcome

__version__ = "0.1.0"

__all__ = [
    "BrokerError",
    "DeadLetter",
    "DeadLetters",
    "Failures",
    "Identify",
    "InFlight",
    "Inbox",
    "InvalidConfiguration",
    "InvalidMessageId",
    "LetterNotFound",
    "MalformedMessage",
    "Message",
    "Mismatch",
    "NotInTransaction",
    "Outcome",
    "Reason",
    "Recorded",
    "SchemaMissing",
    "TransactionAborted",
    "TransactionEnded",
    "TxboxError",
    "identify",
]
