"""An SMTP server on this machine that keeps what it accepts, for tests of what was sent."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from weakref import WeakSet

from txbox_local.errors import LocalServerError, missing_extra

if TYPE_CHECKING:
    from aiosmtpd.smtp import SMTP, Envelope, Session

HOST = "127.0.0.1"

IDLE_SECONDS = 3600.0
"""How long a connection may be silent before it is closed."""

STOP_SECONDS = 10.0

ACCEPTED = "250 accepted"
TRY_LATER = "451 4.3.0 try again later"


@dataclass(frozen=True, slots=True)
class AcceptedMail:
    """A mail that the server has accepted with a 250.

    Attributes:
        sender: from MAIL FROM.
        recipients: from RCPT TO.
        content: headers and text, as they arrived.
    """

    sender: str
    recipients: tuple[str, ...]
    content: bytes


class LocalSmtp:
    """A server on 127.0.0.1 that delivers nothing, keeps everything in memory, and ends with this program.

    It runs in a thread of its own. It accepts whatever it is sent: a mail that arrives twice is kept twice.

    ::

        with LocalSmtp() as smtp, smtplib.SMTP("127.0.0.1", smtp.port) as client:
            client.send_message(mail)
        smtp.accepted

    Args:
        refuses: called once for each mail, when its recipient is named and before its text. True refuses the mail with
            a 451, so its sender knows that it was not accepted.
    """

    def __init__(self, *, refuses: Callable[[], bool] = lambda: False) -> None:
        self._mailbox = _Mailbox(refuses)
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], object] = lambda: None
        self._port = 0

    @property
    def port(self) -> int:
        """The TCP port, chosen by the system.

        Raises:
            RuntimeError: it is not running.
        """
        if self._thread is None:
            raise RuntimeError("the server is not running")
        return self._port

    @property
    def accepted(self) -> tuple[AcceptedMail, ...]:
        """Every mail that it has accepted, in order. They are still there after its end."""
        return tuple(self._mailbox.accepted)

    @property
    def refused(self) -> int:
        """The number of mails that it has refused."""
        return self._mailbox.refused

    def start(self) -> Self:
        """Start the server, and return once it listens. Do nothing if it runs.

        Raises:
            LocalServerError: it could not be started.
        """
        if self._thread is not None:
            return self
        try:
            from aiosmtpd.smtp import SMTP
        except ImportError as missing:
            raise missing_extra(missing) from missing
        listening: Future[tuple[int, Callable[[], object]]] = Future()
        thread = threading.Thread(
            target=lambda: asyncio.run(_serve(SMTP, self._mailbox, listening)), name="local-smtp", daemon=True
        )
        thread.start()
        try:
            self._port, self._stop = listening.result()
        except Exception as error:
            thread.join()
            raise LocalServerError(f"the local SMTP server could not be started: {error}") from error
        self._thread = thread
        return self

    def stop(self) -> None:
        """Close every connection and end. Do nothing if it has ended."""
        if self._thread is None:
            return
        self._stop()
        self._thread.join(STOP_SECONDS)
        self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Mailbox:
    """aiosmtpd's handler: accepts or refuses mails."""

    def __init__(self, refuses: Callable[[], bool]) -> None:
        self._refuses = refuses
        self.accepted: list[AcceptedMail] = []
        self.refused = 0

    async def handle_RCPT(  # noqa: N802 - aiosmtpd's name for it
        self, _server: "SMTP", _session: "Session", envelope: "Envelope", address: str, _options: list[str]
    ) -> str:
        if not envelope.rcpt_tos and self._refuses():
            self.refused += 1
            return TRY_LATER
        envelope.rcpt_tos.append(address)
        return ACCEPTED

    async def handle_DATA(  # noqa: N802 - the same
        self, _server: "SMTP", _session: "Session", envelope: "Envelope"
    ) -> str:
        content = envelope.content if isinstance(envelope.content, bytes) else b""
        # Before the answer: a sender that gets it and one that has died meanwhile have both sent the mail.
        self.accepted.append(AcceptedMail(envelope.mail_from or "", tuple(envelope.rcpt_tos), content))
        return ACCEPTED


async def _serve(smtp: "type[SMTP]", mailbox: _Mailbox, listening: "Future[tuple[int, Callable[[], object]]]") -> None:
    """Serve until stopped. ``listening`` receives the port and a function that stops the server from another thread."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    connections: WeakSet[SMTP] = WeakSet()

    def connected() -> "SMTP":
        # Without a hostname it would ask the network for its own.
        connection = smtp(mailbox, hostname="localhost", timeout=IDLE_SECONDS, loop=loop)
        connections.add(connection)
        return connection

    try:
        server = await loop.create_server(connected, HOST, 0)
    except Exception as error:  # noqa: BLE001 - it is raised where the port is waited for
        listening.set_exception(error)
        return
    listening.set_result((server.sockets[0].getsockname()[1], lambda: loop.call_soon_threadsafe(stopping.set)))
    await stopping.wait()
    server.close()
    for connection in connections:
        if isinstance(connection.transport, asyncio.WriteTransport):
            connection.transport.abort()
    await server.wait_closed()
