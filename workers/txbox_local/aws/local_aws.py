"""SQS, SNS, EventBridge, DynamoDB and Step Functions on this machine: moto's server, reached over HTTP as AWS is."""

import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from txbox_local.errors import LocalServerError, log_tail, missing_extra
from txbox_local.process import KeptProcess
from txbox_local.server import LocalServer

REGION = "us-east-1"
CREDENTIAL = "local"
REQUIRED = ("moto", "flask", "werkzeug", "flask_cors")
"""The modules that `moto[server]` installs and the server's program imports."""


class LocalAws(LocalServer):
    """A server on 127.0.0.1 that answers as AWS does, keeps everything in memory, and ends with this program.

    ::

        with LocalAws() as aws:
            sqs = boto3.client("sqs", endpoint_url=aws.endpoint_url)

    Args:
        port: the TCP port; by default a free one.
        log: the server's log file; by default a temporary one, which ``stop`` removes.
    """

    def __init__(self, *, port: int | None = None, log: Path | None = None) -> None:
        super().__init__()
        self._fixed_port = port
        self._log = Path(log).absolute() if log is not None else None

    @property
    def endpoint_url(self) -> str:
        """The address for boto3's ``endpoint_url``."""
        return f"http://127.0.0.1:{self._while_running(self._port)}"

    def environment(self) -> dict[str, str]:
        """Return boto3's own variables that lead it here, for every service. The server accepts any credentials."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": CREDENTIAL,
            "AWS_SECRET_ACCESS_KEY": CREDENTIAL,
            "AWS_DEFAULT_REGION": REGION,
        }

    def _launch(self) -> tuple[KeptProcess, int]:
        if any(find_spec(name) is None for name in REQUIRED):
            raise missing_extra()
        log = self._log
        if log is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="txbox-aws-"))
            log = self._temporary / "server.log"
        log.write_bytes(b"")
        process = KeptProcess(
            [sys.executable, "-P", "-m", "txbox_local.aws.moto_server", str(self._fixed_port or 0)],
            log=log,
            stop_signal=signal.SIGTERM,
            share_stdout=True,
            remove=self._temporary,
        )
        try:
            process.start()
            port = process.read_line("port ")
            if port is None:
                process.exited(within_seconds=1.0)
                if "already in use" in log_tail(log):
                    raise LocalServerError(f"port {self._fixed_port} of 127.0.0.1 is in use: name another port")
                raise LocalServerError("the local AWS server did not start; its log ends with:", log=log_tail(log))
        except BaseException:
            process.stop()
            raise
        return process, int(port)
