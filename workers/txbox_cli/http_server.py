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
"""How long answers under way may take at the end."""


def serve(app: ASGIApp, listener: socket.socket, *, trusted_proxies: Sequence[str] | None = None) -> None:
    """Serve on a bound socket; return after SIGTERM or SIGINT. A second SIGINT drops the answers under way.

    Args:
        app: what answers.
        listener: the bound socket.
        trusted_proxies: addresses and networks of proxies whose ``X-Forwarded-Proto`` and ``X-Forwarded-For`` are
            believed; None: those of uvicorn's ``FORWARDED_ALLOW_IPS``, or else of this machine.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # it would have the ids that people look up
        server_header=False,
        lifespan="off",
        forwarded_allow_ips=None if trusted_proxies is None else list(trusted_proxies),
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    config.forwarded_allow_ips = _as_sockets_say(config.forwarded_allow_ips)
    _Server(config).run(sockets=[listener])


def _as_sockets_say(trusted: Sequence[str] | str) -> list[str]:
    """Add what addresses and networks of IPv4 are called by a socket of IPv6 that has both: ``::ffff:192.0.2.1``."""
    found = [one.strip() for one in (trusted.split(",") if isinstance(trusted, str) else trusted)]
    for one in list(found):
        with suppress(ValueError):  # no address: uvicorn compares it as a text
            network = IPv4Network(one)
            found.append(f"::ffff:{network.network_address}/{96 + network.prefixlen}")
    return found


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at a signal; uvicorn's own raises it again at the end, and the program would end by it."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
