"""The handler that mails: what it does rests on its lease, and what it notes is true."""

import os
import smtplib
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from support.waiting import wait_until
from txbox import EffectUnknown, LeaseLost, Message
from txbox.leases import Lease, LeaseState, PostgresLedger
from txbox_demo.journal import Diary, Journal, read_diaries
from txbox_demo.notification import SENDING, SENT, SUBSCRIBER, UNSURE, Mail, Notification, read_mail
from txbox_local import LocalSmtp

WORKER = "notification-001"
MESSAGE = Message("m-1", b'{"purchase_id": "cdnow-00001", "customer_id": "00001", "cents": 117700}')
MAIL = Mail("m-1", "cdnow-00001", "00001", 117700, WORKER)


class Answers:
    """Whether the server refuses: as often as it is told to, from now on."""

    refusals = 0

    def __call__(self) -> bool:
        self.refusals -= 1
        return self.refusals >= 0


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def smtp(answers: Answers) -> Iterator[LocalSmtp]:
    with LocalSmtp(refuses=answers) as smtp:
        yield smtp


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / f"{WORKER}.journal")
    yield journal
    journal.close()


@pytest.fixture
def notify(smtp: LocalSmtp, journal: Journal) -> Iterator[Notification]:
    notify = Notification(smtp.port, journal, WORKER)
    yield notify
    notify.close()


@pytest.fixture
def ledger(engine: Engine) -> PostgresLedger:
    return PostgresLedger(engine, SUBSCRIBER)


def acquire(ledger: PostgresLedger, seconds: float = 60.0) -> Lease:
    """Acquire the message's lease, when it is free or has run out."""
    leases: list[Lease] = []

    def acquired() -> bool:
        acquisition = ledger.acquire(MESSAGE.id, seconds=seconds)
        if acquisition.state is LeaseState.ACQUIRED and acquisition.lease is not None:
            leases.append(acquisition.lease)
        return bool(leases)

    wait_until(acquired, "the lease is ours")
    return leases[0]


def mails(smtp: LocalSmtp) -> list[Mail]:
    return [read_mail(accepted) for accepted in smtp.accepted]


def noted(directory: Path) -> dict[str, int]:
    diary = read_diaries(directory, SUBSCRIBER).get(WORKER, Diary())
    return {what: diary.notes[what][MESSAGE.id] for what in (UNSURE, SENDING, SENT)}


def test_a_mail_is_sent_as_often_as_the_handler_is_called(
    notify: Notification, ledger: PostgresLedger, smtp: LocalSmtp, tmp_path: Path
) -> None:
    lease = acquire(ledger)
    for _ in range(2):
        notify(MESSAGE, lease)
    assert mails(smtp) == [MAIL, MAIL]
    assert noted(tmp_path) == {UNSURE: 0, SENDING: 2, SENT: 2}
    assert b"We have billed $1,177.00." in smtp.accepted[0].content


def test_whom_a_mail_went_to_is_what_the_server_was_told(smtp: LocalSmtp) -> None:
    with smtplib.SMTP("127.0.0.1", smtp.port, local_hostname="localhost") as client:
        client.sendmail("a@b.example", ["00002@customers.example", "x@y.example"], MAIL.as_email().as_bytes())
    (mail,) = mails(smtp)
    assert mail.customer_id == "00002 x@y.example"


def test_a_mail_that_is_refused_is_a_failure_and_known(
    notify: Notification, ledger: PostgresLedger, smtp: LocalSmtp, answers: Answers, tmp_path: Path
) -> None:
    answers.refusals = 1
    lease = acquire(ledger)
    with pytest.raises(smtplib.SMTPRecipientsRefused):
        notify(MESSAGE, lease)
    ledger.release(lease)
    assert (mails(smtp), noted(tmp_path)) == ([], {UNSURE: 0, SENDING: 1, SENT: 0})
    notify(MESSAGE, acquire(ledger))
    assert (mails(smtp), noted(tmp_path)) == ([MAIL], {UNSURE: 0, SENDING: 2, SENT: 1})


def test_who_takes_over_from_an_owner_that_nobody_has_heard_of_says_that_it_is_unsure(
    notify: Notification, ledger: PostgresLedger, smtp: LocalSmtp, tmp_path: Path
) -> None:
    acquire(ledger, seconds=0.01)
    notify(MESSAGE, acquire(ledger))
    assert mails(smtp) == [MAIL]
    assert noted(tmp_path) == {UNSURE: 1, SENDING: 1, SENT: 1}


def test_who_has_lost_its_lease_before_the_mail_sends_none(
    notify: Notification, ledger: PostgresLedger, smtp: LocalSmtp, tmp_path: Path
) -> None:
    late = acquire(ledger, seconds=0.01)
    acquire(ledger)
    with pytest.raises(LeaseLost):
        notify(MESSAGE, late)
    assert (mails(smtp), noted(tmp_path)) == ([], {UNSURE: 0, SENDING: 0, SENT: 0})


def test_a_connection_that_broke_is_replaced(
    notify: Notification, ledger: PostgresLedger, smtp: LocalSmtp, tmp_path: Path
) -> None:
    lease = acquire(ledger)
    notify(MESSAGE, lease)
    assert notify._server is not None
    assert notify._server.sock is not None
    os.close(notify._server.sock.detach())
    with pytest.raises((smtplib.SMTPException, OSError)):
        notify(MESSAGE, lease)
    notify(MESSAGE, lease)
    assert mails(smtp) == [MAIL, MAIL]
    assert noted(tmp_path) == {UNSURE: 0, SENDING: 3, SENT: 2}


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


def test_a_server_that_hangs_up_before_it_has_answered_leaves_it_open(
    journal: Journal, ledger: PostgresLedger, tmp_path: Path
) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), _HangsUp) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(EffectUnknown, match="may have the mail"):
            Notification(server.server_address[1], journal, "notification 1")(MESSAGE, acquire(ledger))
    assert noted(tmp_path) == {UNSURE: 0, SENDING: 1, SENT: 0}
