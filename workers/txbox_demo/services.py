"""What the three services do. None of them knows of duplicates.

No transaction can take a mail back. So notification works under a lease, and the ledger knows which mails are sent.
SMTP has no key by which a server could see that it has a mail already, so at some moments that is not known::

    acquire ──→ mail ──→ 250 accepted ──→ complete ──→ ack
           (1)      (2)              (3)          (4)

    killed at (4): the ledger answers that it is done: no second mail
           at (1), (2) or (3): the lease runs out, and the next owner sees only that, in ``lease.unknown_attempts``

The handler must decide. This one sends again, as two mails are better than none. Others raise, to have it parked.
"""

import smtplib
from dataclasses import asdict
from email.mime.text import MIMEText
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.orm import Session

from txbox import EffectUnknown, Message, Outbox, SqlEffect
from txbox.leases import Lease
from txbox_demo.purchases import Purchase

TABLES = """
CREATE TABLE purchase_order (order_id text PRIMARY KEY, customer_id text, ordered_on text, cds int, cents bigint);
CREATE TABLE account (customer_id text PRIMARY KEY, purchases bigint, cds bigint, cents bigint)"""

_INSERT_ORDER = text("INSERT INTO purchase_order VALUES (:order_id, :customer_id, :ordered_on, :cds, :cents)")

BILLING_FILE = Path(__file__).parent / "data" / "account.sql"
"""The effect of a purchase in billing: the same file for the workers and for the bulk load."""

BILLING_FIELDS = "customer_id text not null, cds integer not null, cents bigint not null"


def place_order(session: Session, outbox: Outbox, queue_url: str, purchase: Purchase) -> None:
    """Insert an order and publish it, both in the session's transaction. The order's id is the message's."""
    session.execute(_INSERT_ORDER, asdict(purchase))
    outbox.publish(session, queue_url, purchase.as_json(), key=purchase.customer_id, message_id=purchase.order_id)


def billing(outbox: Outbox, queue_url: str) -> SqlEffect:
    """Return billing's effect: add a purchase to its account and publish, if there is a queue, in one transaction."""
    if not queue_url:
        return SqlEffect(BILLING_FILE, fields=BILLING_FIELDS)
    return SqlEffect(BILLING_FILE, fields=BILLING_FIELDS, outbox=outbox, destination=queue_url)


def send_mail(message: Message, lease: Lease, smtp_port: int) -> None:
    """Send one mail through the server on 127.0.0.1. Its X- headers are for the check."""
    billed = message.json()
    email = MIMEText(f"Thank you! We have billed ${billed['cents'] // 100:,}.{billed['cents'] % 100:02}.\n")
    email["Subject"], email["From"] = f"Your purchase {billed['order_id']}", "shop@cdnow.example"
    email["To"] = f"{billed['customer_id']}@customers.example"
    email["X-Order"], email["X-Cents"], email["X-Message"] = billed["order_id"], str(billed["cents"]), message.id
    email["X-Fence"], email["X-Unknown-Attempts"] = str(lease.fence), str(lease.unknown_attempts)
    lease.ensure()  # a process that was stopped until now may have been replaced
    server = smtplib.SMTP("127.0.0.1", smtp_port, local_hostname="localhost", timeout=10)
    try:
        server.send_message(email)
    except (smtplib.SMTPResponseException, smtplib.SMTPRecipientsRefused):
        raise  # the server has answered, and does not have the mail
    except OSError as error:
        raise EffectUnknown(f"the mail server has not answered, and may have the mail: {error}") from error
    finally:
        server.close()
