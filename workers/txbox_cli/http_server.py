"""Serves an ASGI application until SIGTERM or Ctrl-C."""

import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import IPv4Network

from txbox.extras import needs

with needs("dashboard"):
    import uvicorn
    from starlette.types import ASGIApp

STOP_SECONDS = 5
"""How long responses in progress may take at shutdown."""


def serve(app: ASGIApp, listener: socket.socket, *, trusted_proxies: Sequence[str] | None = None) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT. A second SIGINT drops the responses in progress.

    Args:
        trusted_proxies: addresses and networks of proxies whose ``X-Forwarded-Proto`` and ``X-Forwarded-For`` are
            trusted. None means those in uvicorn's ``FORWARDED_ALLOW_IPS``, or else this machine's.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # it would contain the ids that people look up
        server_header=False,
        lifespan="off",
        forwarded_allow_ips=None if trusted_proxies is None else list(trusted_proxies),
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    config.forwarded_allow_ips = _as_sockets_say(config.forwarded_allow_ips)
    _Server(config).run(sockets=[listener])


def _as_sockets_say(trusted: Sequence[str] | str) -> list[str]:
    """Add the form in which a dual-stack IPv6 socket reports an IPv4 address: ``::ffff:192.0.2.1``."""
    found = [one.strip() for one in (trusted.split(",") if isinstance(trusted, str) else trusted)]
    for one in list(found):
        with suppress(ValueError):  # not an address: uvicorn compares it as text
            network = IPv4Network(one)
            found.append(f"::ffff:{network.network_address}/{96 + network.prefixlen}")
    return found


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at a signal. uvicorn's own version raises the signal again at the end, which would end the program."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
