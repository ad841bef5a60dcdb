"""Send what the outbox holds through a real relay, with or without a fault."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine

from txbox import BrokerError, InvalidConfiguration
from txbox.outbox.status import read_outbox_status
from txbox.relay import OutboxMessage, Publisher, Refused, Relay
from txbox_testing.database import TrialDatabase
from txbox_testing.faults import TIMEOUT_SECONDS, Fault
from txbox_testing.stages.life import Killed, Life
from txbox_testing.stages.stage import Stage, Stoppable, quiet


@dataclass(frozen=True, slots=True)
class RelayedMessages:
    """What relays have handed to publishers.

    Attributes:
        messages: in this order. A message that was sent again is listed again.
    """

    messages: tuple[OutboxMessage, ...]

    @property
    def message_ids(self) -> list[str]:
        """The messages' ids. A message that was sent again has the same id again."""
        return [message.id for message in self.messages]


def relay(
    publishers: Mapping[str, Publisher],
    *,
    engine: Engine,
    fault: Fault | None = None,
    schema: str | None = None,
    prefix: str = "",
    timeout: float = TIMEOUT_SECONDS,
    **options: Any,
) -> RelayedMessages:
    """Send everything that the outbox holds through a real relay.

    Args:
        publishers: by kind of destination, as for ``txbox.relay.Relay``.
        engine: the database, with txbox's tables. A fault may end all its sessions.
        fault: ``crash_at("claimed")``, ``crash_at("sent")``, or None for no fault.
        schema: the schema of txbox's tables; None leaves it to the search path.
        prefix: what the tables' names start with.
        timeout: seconds within which the outbox must be empty.
        options: of ``txbox.relay.Relay``.

    Returns:
        What the publishers were given.

    Raises:
        InvalidConfiguration: an option cannot work, or the fault cannot happen to a relay, or not with this outbox.
        NotSettled: the outbox was not empty in time.
    """
    if fault is not None and fault.of != "relay":
        raise InvalidConfiguration(f'{fault.name} cannot befall a relay; crash_at("claimed") and crash_at("sent") can')
    options = {"schema": schema, "prefix": prefix, **options}
    with (
        contextlib.nullcontext() if fault is None else quiet(),
        TrialDatabase(engine, schema, prefix) as database,
        RelayStage(publishers, engine, database, timeout, options) as stage,
    ):
        if fault is None:
            stage.settle()
        elif not fault.run(stage):
            raise InvalidConfiguration(f"{fault.name} could not happen: the outbox was empty without it")
        return RelayedMessages(tuple(stage.given))


class RelayStage(Stage):
    """Empties the outbox with real relays."""

    def __init__(
        self,
        publishers: Mapping[str, Publisher],
        engine: Engine,
        database: TrialDatabase,
        timeout: float,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(engine, database, timeout)
        self._publishers = publishers
        self._options = options
        self.given: list[OutboxMessage] = []

    def make(self, life: Life) -> Stoppable:
        watched = {kind: _WatchedPublisher(each, life, self.given) for kind, each in self._publishers.items()}
        options = {**self._options, "hooks": [*self._options.get("hooks", ()), self.events.append]}
        return Relay(self.engine, watched, **options)

    def is_done(self) -> bool:
        """Whether the outbox is empty."""
        where = {name: self._options[name] for name in ("schema", "prefix")}
        return read_outbox_status(self.engine, **where).messages == 0


class _WatchedPublisher:
    """A publisher with a place before and after each call."""

    def __init__(self, publisher: Publisher, life: Life, given: list[OutboxMessage]) -> None:
        self._publisher = publisher
        self._life = life
        self._given = given

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        try:
            self._life.reach("claimed")
            self._given.extend(messages)
            refused = self._publisher.send(messages)
            self._life.reach("sent")
        except Killed as killed:
            raise BrokerError("this relay was killed, as the test wants it") from killed
        return refused
