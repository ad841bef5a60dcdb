"""What the services do: it is in the transaction that they are given, or under a lease."""

import json
import socketserver
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text

from support.txbox.leases import acquired_in_time
from txbox import EffectUnknown, LeaseLost, Message, Outbox, SqlEffect
from txbox.leases import PostgresLedger
from txbox.postgres.round_trip import run_steps
from txbox_demo.purchases import Purchase
from txbox_demo.services import billing, send_mail
from txbox_local import LocalSmtp

QUEUE = "https://sqs.eu-central-1.amazonaws.com/123456789012/notifications"
PURCHASE = Purchase("cdnow-00001", "00001", "19970101", 2, 1177)
MESSAGE = Message(PURCHASE.order_id, PURCHASE.as_json().encode())
BILLED = Message("m-1", b'{"order_id": "cdnow-00001", "customer_id": "00001", "cents": 117700}')


def rows(engine: Engine, sql: str) -> list[tuple[object, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(sql))]


def bill(engine: Engine, effect: SqlEffect) -> None:
    with engine.begin() as connection:
        results = run_steps(connection, effect.steps([MESSAGE.id], [effect.read(MESSAGE)]))
        effect.publish(connection, results[-1])


def test_a_purchase_is_added_to_its_account_and_published_if_there_is_a_queue(tables: Engine) -> None:
    bill(tables, billing(Outbox(), ""))
    bill(tables, billing(Outbox(), QUEUE))
    assert rows(tables, "TABLE account") == [("00001", 2, 4, 2354)]
    ((key, body),) = rows(tables, "SELECT key, convert_from(body, 'UTF8') FROM outbox_message")
    assert key == "00001"
    assert json.loads(str(body)) == {"order_id": "cdnow-00001", "customer_id": "00001", "cents": 1177}


@pytest.fixture
def smtp() -> Iterator[LocalSmtp]:
    with LocalSmtp() as smtp:
        yield smtp


@pytest.fixture
def ledger(engine: Engine) -> PostgresLedger:
    return PostgresLedger("notification", engine=engine)


def test_a_mail_is_sent_with_the_sum(ledger: PostgresLedger, smtp: LocalSmtp) -> None:
    send_mail(BILLED, acquired_in_time(ledger, BILLED.id), smtp.port)
    (mail,) = smtp.accepted
    assert mail.recipients == ("00001@customers.example",)
    assert b"We have billed $1,177.00." in mail.content


def test_a_worker_that_has_lost_its_lease_before_the_mail_sends_none(ledger: PostgresLedger, smtp: LocalSmtp) -> None:
    late = acquired_in_time(ledger, BILLED.id, lease_seconds=0.01)
    acquired_in_time(ledger, BILLED.id)
    with pytest.raises(LeaseLost):
        send_mail(BILLED, late, smtp.port)
    assert smtp.accepted == ()


class _HangsUp(socketserver.StreamRequestHandler):
    """A mail server that dies when it has the whole mail, and before it has said so."""

    def handle(self) -> None:
        self.wfile.write(b"220 ready\r\n")
        for line in self.rfile:
            command = line[:4].upper()
            if command == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                for part in self.rfile:
                    if part == b".\r\n":
                        return
            self.wfile.write(b"250 yes\r\n")


def test_a_server_that_hangs_up_before_it_has_answered_leaves_it_open(ledger: PostgresLedger) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), _HangsUp) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(EffectUnknown, match="may have the mail"):
            send_mail(BILLED, acquired_in_time(ledger, BILLED.id), server.server_address[1])
