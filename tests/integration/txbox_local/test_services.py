import psutil
import pytest

from txbox_local import LocalAws, LocalServerError
from txbox_local.services import DevServices


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
