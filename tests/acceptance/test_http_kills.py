"""A web service that is killed: in a handler, and between its commit and its answer; the client sends again."""

import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from sqlalchemy import Engine

from support.processes import killed_at_the_end, start_python
from support.waiting import wait_until
from support.web.service import buy, client_of
from support.web.service_process import COMMITTED, IN_HANDLER, NEVER
from support.workers.business import Business, apply
from txbox import Inbox
from txbox_workers.postgres import PostgresWorker

pytestmark = pytest.mark.chaos

Start = Callable[[str], Any]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A socket that outlives the services: a client waits in its queue until one serves."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        yield listener


@pytest.fixture
def business(engine: Engine) -> Business:
    return Business(engine)


@pytest.fixture
def start(schema_url: str, listener: socket.socket) -> Iterator[Start]:
    with killed_at_the_end() as processes:

        def start(moment: str) -> Any:
            number = listener.fileno()
            arguments = ("-m", "support.web.service_process", str(number), schema_url, moment)
            processes.append(start_python(*arguments, pass_fds=[number]))
            return processes[-1]

        yield start


@pytest.mark.parametrize(("moment", "is_applied"), [(IN_HANDLER, False), (COMMITTED, True)])
def test_the_repeat_after_a_kill_is_answered_and_the_effect_is_there_once(
    business: Business, listener: socket.socket, start: Start, moment: str, is_applied: bool
) -> None:
    with client_of(listener.getsockname()[1]) as client:
        killed = start(moment)
        with pytest.raises(httpx2.TransportError):
            buy(client, "k1")
        assert killed.wait(20) == -signal.SIGKILL
        assert business.applied() == ({"tea": 1} if is_applied else {})

        start(NEVER)
        answers = [buy(client, "k1") for _ in range(2)]

    assert [(answer.status_code, answer.json()) for answer in answers] == [(201, {"item": "tea"})] * 2
    replayed = ["idempotent-replayed" in answer.headers for answer in answers]
    assert replayed == [is_applied, True]
    assert business.applied() == {"tea": 1}
    worker = PostgresWorker(inbox=Inbox("receipts"), engine=business.engine, handler=apply)
    worker.start()
    wait_until(lambda: not business.rows("SELECT 1 FROM outbox_message"), "what its transaction published is settled")
    assert worker.stop()
    assert business.applied() == {"tea": 1, "receipt of tea": 1}
