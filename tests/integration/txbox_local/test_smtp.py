"""The local SMTP server: it keeps what it has answered for, and nothing else."""

import smtplib
import socket
import threading
from collections.abc import Iterator
from email.mime.text import MIMEText

import pytest

from support.waiting import wait_until
from txbox_local import AcceptedMail, LocalSmtp

SENDER, RECIPIENT = "shop@cdnow.example", "00001@customers.example"


@pytest.fixture
def smtp() -> Iterator[LocalSmtp]:
    with LocalSmtp() as smtp:
        yield smtp


def connect(smtp: LocalSmtp) -> smtplib.SMTP:
    return smtplib.SMTP("127.0.0.1", smtp.port, local_hostname="localhost", timeout=10)


def mail(text: str = "hello") -> MIMEText:
    mail = MIMEText(f"{text}\n")
    mail["From"], mail["To"], mail["X-Purchase-Id"] = SENDER, RECIPIENT, "cdnow-00001"
    return mail


def texts(smtp: LocalSmtp) -> list[bytes]:
    return [accepted.content.rpartition(b"\r\n\r\n")[2].strip() for accepted in smtp.accepted]


def test_a_mail_is_kept_as_it_came(smtp: LocalSmtp) -> None:
    content = b"Subject: x\r\n\r\n.begins with a dot\r\n\xc3\xa4\r\n"
    with connect(smtp) as client:
        client.sendmail("a@b.example", ["c@d.example", "e@f.example"], content)
    (accepted,) = smtp.accepted
    assert accepted == AcceptedMail("a@b.example", ("c@d.example", "e@f.example"), content)


def test_a_refused_mail_is_not_kept_and_its_sender_knows_and_can_go_on() -> None:
    answers = iter([True, False, True])
    with LocalSmtp(refuses=lambda: next(answers)) as smtp, connect(smtp) as client:
        with pytest.raises(smtplib.SMTPRecipientsRefused) as refused:
            client.send_message(mail("first"))
        assert refused.value.recipients == {RECIPIENT: (451, b"4.3.0 try again later")}
        client.send_message(mail("second"))
        with pytest.raises(smtplib.SMTPRecipientsRefused):
            client.send_message(mail("third"))
    assert texts(smtp) == [b"second"]
    assert smtp.refused == 2


@pytest.mark.parametrize(("end", "kept"), [(b"\r\n", 0), (b"\r\n.\r\n", 1)], ids=["before its end", "after its end"])
def test_a_mail_whose_sender_dies_is_kept_if_it_was_whole(end: bytes, kept: int, smtp: LocalSmtp) -> None:
    with (
        socket.create_connection(("127.0.0.1", smtp.port), timeout=10) as connection,
        connection.makefile("rb") as said,
    ):
        assert said.readline().startswith(b"220 ")
        for command in (b"HELO localhost", b"MAIL FROM:<a@b.example>", b"RCPT TO:<c@d.example>", b"DATA"):
            connection.sendall(command + b"\r\n")
            assert said.readline()[:1] in (b"2", b"3")
        connection.sendall(b"Subject: x\r\n\r\ndying" + end)  # and the answer is not waited for
    with connect(smtp) as client:
        client.send_message(mail("the next one"))
    wait_until(lambda: sorted(texts(smtp)) == sorted([b"dying"] * kept + [b"the next one"]), "it is kept, or not")


def test_it_listens_on_one_address_of_this_machine(smtp: LocalSmtp) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", smtp.port), timeout=10)


def test_its_end_closes_connections_and_keeps_what_came() -> None:
    smtp = LocalSmtp().start()
    assert smtp.start() is smtp
    port = smtp.port
    with connect(smtp) as client:
        client.send_message(mail())
        smtp.stop()
        assert "local-smtp" not in {thread.name for thread in threading.enumerate()}
        smtp.stop()
        with pytest.raises((smtplib.SMTPServerDisconnected, ConnectionError)):
            client.send_message(mail("too late"))
    assert texts(smtp) == [b"hello"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)
    with pytest.raises(RuntimeError, match="not running"):
        _ = smtp.port


def test_it_can_be_started_again_and_still_has_what_came() -> None:
    smtp = LocalSmtp()
    for text in ("before", "after"):
        with smtp, connect(smtp) as client:
            client.send_message(mail(text))
    assert texts(smtp) == [b"before", b"after"]
