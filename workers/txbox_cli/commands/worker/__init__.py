"""``txbox worker``: run a worker of yours, in one process or in several."""

from txbox_cli.commands.worker.command import worker

__all__ = ["worker"]
