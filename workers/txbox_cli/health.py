"""``--health-port``: whether a service lives and is ready, and its metrics, for Kubernetes and Prometheus."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from txbox.instrumentation import BrokerLost, BrokerRestored, DatabaseLost, DatabaseRestored, Event
from txbox_cli.monitoring_server import Answer, answering, line

if TYPE_CHECKING:
    from txbox.service import Service
    from txbox_workers.coroutines import AsyncWorker

HealthPortOption = Annotated[
    int | None,
    typer.Option(
        metavar="PORT",
        help="Answer GET /live, /ready and, where prometheus_client is installed, /metrics there; 0 is any free port.",
        min=0,
        max=65535,
        show_default=False,
    ),
]
HealthHostOption = Annotated[
    str,
    typer.Option(metavar="HOST", help="Where --health-port listens; probes of Kubernetes need 0.0.0.0."),
]
HEALTH_HOST = "127.0.0.1"


Watched: TypeAlias = "Service | AsyncWorker"
"""A service that can be asked how it is."""


class Health:
    """A service's health, kept by a hook that the service's threads call."""

    def __init__(self, service: Watched) -> None:
        self._service = service
        self._started = False
        self._lost: dict[str, bool] = {}

    def __call__(self, event: Event) -> None:
        from txbox.outbox.outbox import RELAY_SUBSCRIBER

        match event:
            case DatabaseLost():
                self._lost["the database cannot be used"] = True
            case DatabaseRestored():
                self._lost["the database cannot be used"] = False
            # A relay still sends elsewhere, and cannot tell when a destination works again that it sends nothing to.
            case BrokerLost() if event.subscriber_id != RELAY_SUBSCRIBER:
                self._lost["the broker cannot be reached"] = True
            case BrokerRestored():
                self._lost["the broker cannot be reached"] = False

    def started(self) -> None:
        """Record that the service has started."""
        self._started = True

    def live(self) -> tuple[int, str, bytes]:
        """Return 200 while the service starts and while all its threads run."""
        return _probe("live", self.why_not_live())

    def ready(self) -> tuple[int, str, bytes]:
        """Return 200 while the service works and can use what it needs, otherwise 503 with the reason."""
        return _probe("ready", self.why_not_ready())

    def why_not_live(self) -> str | None:
        """Return why the service cannot recover by itself, or None."""
        return None if not self._started or self._service.running else "a thread has ended"

    def why_not_ready(self) -> str | None:
        """Return why the service does not work or cannot use what it needs, or None."""
        if self._service.stopping:
            return "it is stopping"
        if not self._started:
            return "it has not started yet"
        if not self._service.running:
            return "a thread has ended"
        return ", and ".join(why for why, lost in self._lost.copy().items() if lost) or None


def _probe(word: str, why_not: str | None) -> tuple[int, str, bytes]:
    return line(200, word) if why_not is None else line(503, f"not {word}: {why_not}")


@contextmanager
def health_of(service: Watched, host: str, port: int | None) -> Iterator[Callable[[], None]]:
    """Serve a service's probes while entered, unless ``port`` is None. Yield what to call once the service has started.

    Raises:
        CommandFailed: the port is in use, or the host is not this machine's.
    """
    health = Health(service)
    if port is None:
        yield health.started
        return
    service.add_hook(health)
    answers: dict[str, Answer] = {"/live": health.live, "/ready": health.ready}
    if metrics := _metrics_of(service):
        answers["/metrics"] = metrics
    with _answering(host, port, answers):
        yield health.started


@contextmanager
def probes_of(
    why_not_live: Callable[[], str | None], why_not_ready: Callable[[], str | None], host: str, port: int | None
) -> Iterator[None]:
    """Serve the probes of several processes while entered, unless ``port`` is None. Raises as ``health_of``."""
    if port is None:
        yield
        return
    answers = {"/live": lambda: _probe("live", why_not_live()), "/ready": lambda: _probe("ready", why_not_ready())}
    with _answering(host, port, answers):
        yield


@contextmanager
def _answering(host: str, port: int, answers: Mapping[str, Answer]) -> Iterator[None]:
    with answering(host, port, answers, option="--health-port") as bound:
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"health: http://{shown}:{bound} has {', '.join(answers)}")
        yield


def _metrics_of(service: Watched) -> Answer | None:
    """Return the function that answers with this process's metrics, or None if prometheus_client is not installed."""
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

        from txbox.instrumentation.prometheus import PrometheusHook
    except ImportError:
        return None
    try:
        service.add_hook(PrometheusHook())
    except ValueError:
        """The module that made the service has registered a PrometheusHook, which counts already."""
    return lambda: (200, CONTENT_TYPE_LATEST, generate_latest(REGISTRY))
