import signal

import pytest

from txbox_local import process_keeper


def test_what_follows_the_dashes_is_the_program() -> None:
    options = process_keeper.parse(["--stop-signal", "SIGINT", "--user", "nobody", "--", "postgres", "-D", "--user"])
    assert options == process_keeper.KeeperOptions(
        command=["postgres", "-D", "--user"], stop_signal=signal.SIGINT, user="nobody"
    )


def test_an_unknown_signal_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        process_keeper.parse(["--stop-signal", "SIGNOTHING", "--", "true"])
    assert "SIGNOTHING" in capsys.readouterr().err
