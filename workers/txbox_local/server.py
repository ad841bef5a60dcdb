"""The base class of LocalPostgres and LocalAws: how they start and how they end."""

import atexit
import os
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from txbox_local.errors import no_space
from txbox_local.process import KeptProcess


class LocalServer(ABC):
    """A server that ends with this program.

    Only the process that called ``start`` can stop it. A fork of it that exits, or that leaves a ``with`` block,
    changes nothing.

    A subclass launches it. ``stop`` removes what the subclass puts into `_temporary`; so does a failed launch.
    """

    def __init__(self) -> None:
        self._process: KeptProcess | None = None
        self._port: int | None = None
        self._temporary: Path | None = None
        self._owner = -1

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._while_running(None if self._process is None else self._process.pid)

    @property
    def keeper_pid(self) -> int:
        """The process id of the server's keeper."""
        return self._while_running(None if self._process is None else self._process.keeper_pid)

    def start(self) -> Self:
        """Start the server and wait until it accepts connections. Do nothing if it runs.

        Raises:
            LocalServerError: it could not be started. The message says why, and what to do.
        """
        if self._process is not None:
            return self
        self._owner = os.getpid()
        try:
            self._process, self._port = self._launch()
        except BaseException as error:
            self._remove_temporary()
            if isinstance(error, OSError) and (full := no_space(error)):
                raise full from error
            raise
        atexit.register(self.stop)
        return self

    def stop(self) -> None:
        """Stop the server and remove what was temporary. Do nothing if it is stopped."""
        if self._process is None or self._owner != os.getpid():
            return
        atexit.unregister(self.stop)
        self._process.stop()
        self._process = None
        self._remove_temporary()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def _launch(self) -> tuple[KeptProcess, int]:
        """Start the server and wait until it accepts connections. Return its process and its TCP port."""

    def _while_running(self, value: int | None) -> int:
        if self._process is None or value is None:
            raise RuntimeError("the server is not running")
        return value

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
