"""`make audit-dependencies` says what is known of the pinned versions, or fails if nobody can be asked."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
UNREACHABLE = "http://127.0.0.1:9"

Known = dict[str, str]
Serve = Callable[[Known], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve vulnerabilities of packages by the protocol of OSV: serve({"jinja2": "GHSA-1"}) returns the URL."""
    servers: list[ThreadingHTTPServer] = []

    def start(known: Known) -> str:
        class Osv(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                package = json.loads(self.rfile.read(int(self.headers["content-length"])))["package"]
                vulnerability = {"id": known.get(package["name"]), "affected": [{"package": package}]}
                body = json.dumps({"vulns": [vulnerability]} if vulnerability["id"] else {}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Osv))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def audit(folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    pins = folder / "constraints.txt"
    pins.write_text("sqlalchemy==2.1.0\n")
    program = Path(sys.executable).with_name("pip-audit")
    service = ["--vulnerability-service", "osv", "--osv-url", url, "--timeout", "5"]
    return subprocess.run(
        [REPOSITORY / "tests/dependencies/audit.sh", program, pins.name, *service],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_nothing_known(tmp_path: Path, serve: Serve) -> None:
    ended = audit(tmp_path, serve({"jinja2": "GHSA-1"}))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "no vulnerability is known of the versions in constraints.txt\n"


def test_a_vulnerability_is_named(tmp_path: Path, serve: Serve) -> None:
    ended = audit(tmp_path, serve({"jinja2": "GHSA-1", "sqlalchemy": "GHSA-2"}))
    assert ended.returncode == 1
    assert "GHSA-2" in ended.stdout
    assert "GHSA-1" not in ended.stdout


def test_a_service_that_cannot_be_reached_is_no_pass(tmp_path: Path) -> None:
    ended = audit(tmp_path, UNREACHABLE)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("constraints.txt was not audited: ")
    assert "host='127.0.0.1', port=9" in line


def test_a_service_that_knows_nothing_at_all_is_no_pass(tmp_path: Path, serve: Serve) -> None:
    ended = audit(tmp_path, serve({}))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines() == [
        "constraints.txt was not audited: the service knows no vulnerability of jinja2 2.4.1, which has some"
    ]
