"""Retention: how long each kind of data is kept."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta

from txbox.errors import InvalidConfiguration
from txbox.inbox.age_judge import MIN_WINDOW

EVERY_SUBSCRIBER = "*"
"""Stands for every subscriber that is not named."""

LONGEST = timedelta(days=36_500)
"""A longer window leads to dates that Postgres does not have."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The windows of a maintainer. None means for ever.

    What is certainly garbage needs no window and goes after a day: failures of processed messages, chunks without a
    run, rows of relays and workers that are gone. So do staging tables of finished loads.

    Attributes:
        inbox: how long ids are kept, by subscriber; ``*`` stands for every subscriber that is not named. A message sent
            before the window began is not run any more: the subscriber's horizon moves with the window.
        leases: how long completed leases of every subscriber are kept. The horizon moves with this window too.
        results: how long results of completed leases are kept. The lease stays: a copy of the message is a duplicate
            and gets no result.
        responses: how long responses to HTTP requests are kept, but never longer than their subscriber's ids. The id
            stays: a repeat is not run and gets no response.
        letters: how long dead letters are kept after they were redriven or discarded.
        operations: how long redrives and discards by filter are kept on record after they finished.
        sent: how long sent messages are kept, if relays keep them.
        loads: how long the ledger's rows of finished bulk loads are kept.
        staging: how long the staging tables of unfinished bulk loads are kept once no process works on the load. Such a
            load can still be resumed: it stages its events again.

    Raises:
        InvalidConfiguration: a window is not a timedelta, not more than 0, or longer than 100 years; or a window of
            ids, leases or staging tables is shorter than an hour.
    """

    inbox: Mapping[str, timedelta] = field(default_factory=dict)
    leases: timedelta | None = None
    results: timedelta | None = None
    responses: timedelta | None = None
    letters: timedelta | None = None
    operations: timedelta | None = None
    sent: timedelta | None = None
    loads: timedelta | None = None
    staging: timedelta | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.inbox, Mapping):
            raise InvalidConfiguration(f"Retention.inbox must have a timedelta for each subscriber, not {self.inbox!r}")
        windows: dict[str, object] = {f"inbox[{name!r}]": window for name, window in self.inbox.items()}
        others = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "inbox"}
        windows |= {name: window for name, window in others.items() if window is not None}
        for name, window in windows.items():
            if not isinstance(window, timedelta) or not timedelta(0) < window <= LONGEST:
                raise InvalidConfiguration(
                    f"Retention.{name} must be a timedelta of more than 0 and at most {LONGEST.days:,} days, "
                    f"not {window!r}"
                )
            if (name in ("leases", "staging") or name.startswith("inbox")) and window < MIN_WINDOW:
                raise InvalidConfiguration(f"Retention.{name} must be at least an hour, not {window!r}")

    def of_inbox(self, subscriber_id: str) -> timedelta | None:
        """Return how long a subscriber's ids are kept; None: for ever."""
        return self.inbox.get(subscriber_id, self.inbox.get(EVERY_SUBSCRIBER))
