import psutil
import pytest

from txbox_local import LocalAws, LocalServerError
from txbox_local.services import DevServices


def test_both_start_and_stop_together() -> None:
    with DevServices(durable=False) as services:
        environment = services.environment()
        assert environment["TXBOX_DATABASE_URL"] == services.postgres.url
        assert environment["AWS_ENDPOINT_URL"] == services.aws.endpoint_url
        pids = [services.postgres.pid, services.aws.pid]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    services.stop()


def test_when_one_fails_the_other_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    services = DevServices(durable=False)

    def fail(_: LocalAws) -> LocalAws:
        pids.append(services.postgres.pid)
        raise LocalServerError("no")

    monkeypatch.setattr(LocalAws, "start", fail)
    with pytest.raises(LocalServerError, match="no"):
        services.start()
    assert not psutil.pid_exists(pids[0])
