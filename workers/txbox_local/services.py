"""PostgreSQL and AWS for a service under development, started and stopped together."""

from contextlib import ExitStack
from pathlib import Path
from typing import Self

from txbox_local.aws.local_aws import LocalAws
from txbox_local.postgres.local_postgres import LocalPostgres


class DevServices:
    """PostgreSQL and, unless ``aws`` is False, a local AWS for `txbox dev`.

    The other arguments are those of ``LocalPostgres`` and of ``LocalAws``.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        port: int | None = None,
        aws: bool = True,
        aws_port: int | None = None,
        durable: bool = True,
    ) -> None:
        self.postgres = LocalPostgres(directory, port=port, durable=durable)
        self.aws = LocalAws(port=aws_port) if aws else None
        self._started = ExitStack()

    def start(self) -> Self:
        """Start them. If one fails with ``LocalServerError``, stop the other."""
        with ExitStack() as starting:
            starting.enter_context(self.postgres)
            if self.aws is not None:
                starting.enter_context(self.aws)
            self._started = starting.pop_all()
        return self

    def stop(self) -> None:
        """Stop them. Do nothing if they are stopped."""
        self._started.close()

    def environment(self) -> dict[str, str]:
        """Return the variables that lead txbox and boto3 to these services."""
        return {"TXBOX_DATABASE_URL": self.postgres.url, **(self.aws.environment() if self.aws else {})}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
