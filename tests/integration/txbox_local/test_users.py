import os
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.ordinary_user import reachable_directory
from txbox_local import LocalPostgres, LocalServerError
from txbox_local.postgres import installation
from txbox_local.postgres.installation import bin_directory, find_installation

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="what root does differently: run the tests as root")


def test_an_ordinary_user(start_owner: Callable[..., Any], as_nobody: dict[str, Any]) -> None:
    owner = start_owner(None, **as_nobody)
    for process in owner.servers():
        assert process.uids().real == as_nobody["user"]
    directory = Path(owner.report["postgres"]["directory"])
    assert directory.parent == Path(as_nobody["env"]["TMPDIR"])
    owner.process.stdin.close()
    assert owner.process.wait() == 0
    assert not directory.exists()


@pytest.fixture(scope="module")
def private_packages() -> Iterator[Path]:
    """An installation below a directory that only root can enter."""
    with reachable_directory() as directory:
        packages = directory / "private" / "site-packages"
        for name in installation.COPIED:
            shutil.copytree(bin_directory().parents[2] / name, packages / name, symlinks=True)
        (directory / "private").chmod(0o700)
        yield packages


@pytest.fixture
def unreachable(private_packages: Path, reachable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That installation is the one to be used, and the cache is empty."""
    monkeypatch.setattr(installation, "_site_packages", lambda: private_packages)
    monkeypatch.setattr(installation, "CACHE_DIRECTORY", reachable / "cache")


@root_only
def test_an_unreachable_installation_is_copied_once(unreachable: None, reachable: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: find_installation(), range(3)))
    assert len(set(found)) == 1
    assert found[0].bin.is_relative_to(reachable / "cache")
    assert len(list((reachable / "cache").iterdir())) == 1
    for path in (found[0].bin, found[0].bin / "postgres"):
        assert path.stat().st_uid == 0
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    copied = (found[0].bin / "postgres").stat().st_ino
    with LocalPostgres(durable=False) as server:
        assert psutil.Process(server.pid).exe().startswith(str(reachable / "cache"))
    assert (found[0].bin / "postgres").stat().st_ino == copied


@root_only
def test_a_copy_that_others_could_change_is_not_run(unreachable: None, reachable: Path) -> None:
    (reachable / "cache").mkdir()
    (reachable / "cache").chmod(0o777)
    with pytest.raises(LocalServerError, match="could be changed by others than root"):
        find_installation()


@root_only
def test_a_directory_that_the_server_cannot_reach(reachable: Path) -> None:
    private = reachable / "private"
    private.mkdir(mode=0o700)
    with pytest.raises(LocalServerError, match="name a directory that every user can reach"):
        LocalPostgres(private / "data", durable=False).start()


@root_only
def test_an_unreachable_temporary_directory_is_passed_over(reachable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = reachable / "private"
    private.mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(private))
    with LocalPostgres(durable=False) as server:
        assert not server.directory.is_relative_to(private)
