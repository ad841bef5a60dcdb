"""SQS, SNS and DynamoDB on this machine: moto's server, reached over HTTP as AWS would be."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from txbox_workers.embedded.errors import EmbeddedServerError, log_tail, missing_extra
from txbox_workers.embedded.process import KeptProcess

REGION = "us-east-1"
CREDENTIAL = "local"
REQUIRED = ("moto", "flask", "werkzeug", "flask_cors")
"""What `moto[server]` installs and the server's program imports."""


class LocalAws:
    """A server on 127.0.0.1 that answers like AWS, keeps everything in memory and ends with this program.

    ::

        with LocalAws() as aws:
            sqs = boto3.client("sqs", endpoint_url=aws.endpoint_url)

    Args:
        log: the file that receives what the server has to say; by default a temporary one, removed by ``stop``.
    """

    def __init__(self, *, log: Path | None = None) -> None:
        self._log = Path(log).absolute() if log is not None else None
        self._temporary: Path | None = None
        self._process: KeptProcess | None = None
        self._port: int | None = None
        self._owner = -1

    @property
    def endpoint_url(self) -> str:
        """The address for boto3's ``endpoint_url``."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """The process id of the server."""
        if self._process is None or self._process.pid is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    @property
    def keeper_pid(self) -> int:
        """The process id of the server's keeper."""
        if self._process is None or self._process.keeper_pid is None:
            raise RuntimeError("the server is not running")
        return self._process.keeper_pid

    def environment(self) -> dict[str, str]:
        """boto3's own variables that lead it here; it accepts any credentials."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": CREDENTIAL,
            "AWS_SECRET_ACCESS_KEY": CREDENTIAL,
            "AWS_DEFAULT_REGION": REGION,
        }

    def start(self) -> Self:
        """Start the server and wait until it accepts connections; does nothing when it runs.

        Raises:
            EmbeddedServerError: the ``[embedded]`` extra is missing, or the server did not start.
        """
        if self._process is not None:
            return self
        if any(find_spec(name) is None for name in REQUIRED):
            raise missing_extra()
        self._owner = os.getpid()
        log = self._log
        if log is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="txbox-aws-"))
            log = self._temporary / "server.log"
        log.write_bytes(b"")
        process = KeptProcess(
            [sys.executable, "-P", "-m", "txbox_workers.embedded.aws_server"],
            log=log,
            stop_signal=signal.SIGTERM,
            share_stdout=True,
            remove=self._temporary,
        )
        try:
            process.start()
            port = process.read_line("port ")
            if port is None:
                process.exited(within_s=1.0)
                raise EmbeddedServerError("the local AWS server did not start; its log ends with:", log=log_tail(log))
        except BaseException:
            process.stop()
            self._remove_temporary()
            raise
        self._process, self._port = process, int(port)
        atexit.register(self.stop)
        return self

    def stop(self) -> None:
        """Stop the server; its queues and tables are gone. Does nothing when it is stopped."""
        if self._process is None or self._owner != os.getpid():
            return
        atexit.unregister(self.stop)
        self._process.stop()
        self._process = None
        self._remove_temporary()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
