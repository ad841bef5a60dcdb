from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest

from txbox_local.aws.moto_server import MotoDispatcher
from txbox_local.aws.moto_sqs import LOCK


class Application:
    """Stands in for one of moto's services; notes whether another thread could have run beside it."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.alone: bool | None = None

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        def other() -> None:
            self.alone = not LOCK.acquire(blocking=False)
            if not self.alone:
                LOCK.release()

        thread = Thread(target=other)
        thread.start()
        thread.join()
        return []


@pytest.mark.parametrize(("service", "alone"), [("sqs", True), ("dynamodb", True), ("sns", False)])
def test_what_shares_state_runs_alone(service: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = MotoDispatcher()
    application = Application(service)
    monkeypatch.setattr(dispatcher, "get_application", lambda environ: application)
    dispatcher({}, lambda *_: None)
    assert application.alone is alone


def test_a_host_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = MotoDispatcher()
    assert dispatcher.get_backend_for_host("sqs.us-east-1.amazonaws.com") == "sqs"
    monkeypatch.setattr(dispatcher, "backend_url_patterns", [])
    assert dispatcher.get_backend_for_host("sqs.us-east-1.amazonaws.com") == "sqs"
