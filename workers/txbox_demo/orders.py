"""What a process of the demo is told when it starts."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sqlalchemy import Engine

from txbox.postgres.urls import database_engine, database_url

__all__ = ["Orders"]


@dataclass(frozen=True, slots=True)
class Orders:
    """What a process is to do.

    Attributes:
        role: what it is: "shop", "relay", "billing" or "notification".
        database_url: the database, with the place's schema as its search path.
        purchases_url: the queue that billing reads.
        notifications_url: the queue that notification reads; empty: there is none, and billing tells nobody.
        purchases: how many of the file's purchases the shops place.
        visibility_seconds: how long a delivery is a worker's own.
        smtp_port: of the SMTP server on 127.0.0.1; 0: there is none, and nobody notifies.
        directory: for its journal and its log.
        environment: variables that lead to AWS.
        number: the how-manieth process of its role, from 1.
        slot: whose place it takes among those of its role that work at the same time, from 0.
        slots: how many work at the same time.
        moment: where it kills itself; "" and "anywhere" for nowhere.
        life: after about how many messages it does.
        seed: of its random choices.
    """

    role: str
    database_url: str
    purchases_url: str
    notifications_url: str
    purchases: int
    visibility_seconds: int
    smtp_port: int
    directory: str
    environment: dict[str, str] = field(default_factory=dict)
    number: int = 1
    slot: int = 0
    slots: int = 1
    moment: str = ""
    life: int = 0
    seed: int = 0

    @property
    def journal(self) -> Path:
        """The file in which it writes down what it sees."""
        return self._file("journal")

    @property
    def log(self) -> Path:
        """The file that gets what it prints."""
        return self._file("log")

    @property
    def name(self) -> str:
        """What it is called in errors."""
        return f"{self.role} {self.number}"

    @property
    def process(self) -> str:
        """What its files are called, without their endings; no two processes are called the same."""
        return f"{self.role}-{self.number:03}"

    def engine(self) -> Engine:
        """Make an engine on the place's tables; up to ten connections."""
        return database_engine(database_url(self.database_url), pool_size=10)

    def as_json(self) -> str:
        """Return the orders as one line."""
        return json.dumps(asdict(self))

    def _file(self, suffix: str) -> Path:
        return Path(self.directory) / f"{self.process}.{suffix}"
