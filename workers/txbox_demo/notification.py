"""The last service of the chain: mails customers what was billed. No transaction can take a mail back.

So it works under a lease, and the ledger knows which mails are done. SMTP has no key by which a server could tell that
it has a mail already; and so there is one moment after which nobody can know whether a mail was sent::

    acquire ──→ mail ──→ 250 accepted ──→ complete ──→ ack
           (1)      (2)              (3)          (4)
    a worker killed at (4): the ledger answers that it is done: no second mail
                    at (1), (2) or (3): the lease runs out, and all that the next owner sees is that. At (1) nothing
                    was sent, at (3) it was, and at (2) only the server knows

The ledger says that it does not know: ``lease.unknown_attempts``. What to do then, the handler has to decide. This one
sends again, because a customer who is told twice is better off than one who is not told. One that must not do so would
raise here, and have the message parked for a person to look at.
"""

import smtplib
from dataclasses import dataclass
from email.mime.text import MIMEText
from email.parser import BytesHeaderParser
from typing import TYPE_CHECKING, Any

from txbox import EffectUnknown, Message
from txbox.leases import Lease
from txbox_demo.journal import Journal

if TYPE_CHECKING:
    from txbox_local import AcceptedMail

__all__ = ["SENDING", "SENT", "SUBSCRIBER", "UNSURE", "Mail", "Notification", "read_mail"]

SUBSCRIBER = "notification"

UNSURE = "unsure"
SENDING = "sending"
SENT = "sent"
"""What the journal says: nobody knows whether it was sent before; it is about to be sent; the server has accepted it.

Only the reckoning reads that. The handler has nothing but its lease."""

LEASE_SECONDS = 3.0
"""Short, so that what a killed worker held comes again soon."""

SENDER = "shop@cdnow.example"
DOMAIN = "customers.example"
TIMEOUT_SECONDS = 10.0

_MESSAGE_ID, _PURCHASE_ID, _CENTS, _WORKER = "X-Message-Id", "X-Purchase-Id", "X-Cents", "X-Worker"


@dataclass(frozen=True, slots=True)
class Mail:
    """A mail that tells a customer of a purchase.

    Attributes:
        message_id: of the message that it was sent for.
        purchase_id: which purchase.
        customer_id: who is told.
        cents: what was billed.
        worker: the process that sends it (``Orders.process``).
    """

    message_id: str
    purchase_id: str
    customer_id: str
    cents: int
    worker: str

    def as_email(self) -> MIMEText:
        """Write it."""
        email = MIMEText(f"Thank you! We have billed ${self.cents // 100:,}.{self.cents % 100:02}.\n")
        email["From"] = SENDER
        email["To"] = f"{self.customer_id}@{DOMAIN}"
        email["Subject"] = f"Your purchase {self.purchase_id}"
        email[_MESSAGE_ID] = self.message_id
        email[_PURCHASE_ID] = self.purchase_id
        email[_CENTS] = str(self.cents)
        email[_WORKER] = self.worker
        return email


def read_mail(accepted: "AcceptedMail") -> Mail:
    """Read a mail that the server has accepted; whom it went to is what the server was told, not what the mail says."""
    headers = BytesHeaderParser().parsebytes(accepted.content)
    return Mail(
        message_id=headers[_MESSAGE_ID],
        purchase_id=headers[_PURCHASE_ID],
        customer_id=" ".join(recipient.removesuffix(f"@{DOMAIN}") for recipient in accepted.recipients),
        cents=int(headers[_CENTS]),
        worker=headers[_WORKER],
    )


class Notification:
    """The handler. It knows nothing of duplicates; of attempts that nobody knows the end of, its lease tells it."""

    def __init__(self, smtp_port: int, journal: Journal, worker: str) -> None:
        """Prepare; nothing is connected before the first mail.

        Args:
            smtp_port: of the SMTP server on 127.0.0.1.
            journal: gets what has happened.
            worker: the name of this process (``Orders.process``).
        """
        self._smtp_port = smtp_port
        self._journal = journal
        self._worker = worker
        self._server: _Server | None = None

    def __call__(self, message: Message, lease: Lease) -> None:
        """Send one mail; it raises if the server does not take it, and says so if that is not known."""
        billed = message.json()
        email = Mail(message.id, billed["purchase_id"], billed["customer_id"], billed["cents"], self._worker).as_email()
        if lease.unknown_attempts:
            self._journal.note(UNSURE, [message.id])
        lease.ensure()  # a process that was stopped until now may have been replaced
        self._journal.note(SENDING, [message.id])
        self._send(email)
        self._journal.note(SENT, [message.id])

    def close(self) -> None:
        """Close the connection to the server."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _send(self, email: MIMEText) -> None:
        if self._server is None:
            # By its name it would ask the network for its own.
            self._server = _Server("127.0.0.1", self._smtp_port, local_hostname="localhost", timeout=TIMEOUT_SECONDS)
        server = self._server
        try:
            server.send_message(email)
        except smtplib.SMTPRecipientsRefused:
            raise  # the connection is as good as before
        except BaseException as error:
            self.close()
            if server.answer_is_due:
                raise EffectUnknown(f"the mail server has not answered, and may have the mail: {error}") from error
            raise


class _Server(smtplib.SMTP):
    """A connection that knows whether the server has a mail that it has not answered for."""

    answer_is_due = False

    def data(self, msg: Any) -> tuple[int, bytes]:
        """Send the mail itself; the server has it, or not, from here to its answer."""
        self.answer_is_due = True
        answer = super().data(msg)
        self.answer_is_due = False
        return answer
