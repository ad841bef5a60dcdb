import signal

from txbox_local import process_keeper


def test_what_follows_the_dashes_is_the_program() -> None:
    options = process_keeper.parse(["--stop-signal", "SIGINT", "--user", "nobody", "--", "postgres", "-D", "--user"])
    assert options == process_keeper.KeeperOptions(
        command=["postgres", "-D", "--user"], stop_signal=signal.SIGINT, user="nobody"
    )
