"""``txbox worker``: run a worker of yours, in one process or in several; ``txbox schema``: what its messages are."""

from txbox_cli.commands.worker.command import worker
from txbox_cli.commands.worker.schema import schema

__all__ = ["schema", "worker"]
