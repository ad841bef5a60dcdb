"""The demo's publisher, which is unlucky: what it writes down, loses, and where it dies."""

import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from txbox import BrokerError
from txbox.relay import OutboxMessage, Refused
from txbox_demo import relay_process
from txbox_demo.journal import Journal, read_notes
from txbox_demo.relay_process import CLAIMED, CONFIRMED, HANDED, LOST_ANSWER_SHARE, SENT, Unlucky

MESSAGES = [OutboxMessage(f"m-{number}", "own:x", b"") for number in range(5)]


class Broker:
    """A publisher that takes everything but what it is told to refuse."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.refuses: set[str] = set()
        self.error: Exception | None = None

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        if self.error is not None:
            raise self.error
        self.taken += [message.id for message in messages if message.id not in self.refuses]
        return [Refused(message, "no") for message in messages if message.id in self.refuses]


@pytest.fixture
def broker() -> Broker:
    return Broker()


def unlucky(broker: Broker, directory: Path, **changes: Any) -> Unlucky:
    settings: dict[str, Any] = {"moment": "", "life": 0, "seed": 1}
    return Unlucky(broker, Journal(directory / "relay-001.journal"), **{**settings, **changes})


def test_what_is_handed_over_and_what_is_confirmed_is_written_down(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_process, "LOST_ANSWER_SHARE", 0.0)
    broker.refuses = {"m-1"}
    refused = unlucky(broker, tmp_path).send(MESSAGES)
    assert [(refusal.message.id, refusal.error) for refusal in refused] == [("m-1", "no")]
    notes = read_notes(tmp_path, "relay")
    assert notes[HANDED] == dict.fromkeys(["m-0", "m-1", "m-2", "m-3", "m-4"], 1)
    assert notes[CONFIRMED] == dict.fromkeys(["m-0", "m-2", "m-3", "m-4"], 1)


def test_messages_whose_answer_is_lost_have_arrived_and_are_refused_once(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_process, "LOST_ANSWER_SHARE", 1.0)
    broker.refuses = {"m-1"}
    refused = unlucky(broker, tmp_path).send(MESSAGES)
    assert sorted(refusal.message.id for refusal in refused) == [message.id for message in MESSAGES]
    assert not any(refusal.final for refusal in refused)
    assert broker.taken == ["m-0", "m-2", "m-3", "m-4"]
    assert read_notes(tmp_path, "relay")[CONFIRMED] == {}


def test_about_the_stated_share_of_answers_is_lost(broker: Broker, tmp_path: Path) -> None:
    relay = unlucky(broker, tmp_path)
    lost = sum(len(relay.send([message])) for message in MESSAGES * 1000)
    assert lost / 5000 == pytest.approx(LOST_ANSWER_SHARE, abs=0.02)


def test_an_outage_stays_an_outage(broker: Broker, tmp_path: Path) -> None:
    broker.error = BrokerError("unplugged")
    with pytest.raises(BrokerError, match="unplugged"):
        unlucky(broker, tmp_path).send(MESSAGES)
    assert read_notes(tmp_path, "relay")[CONFIRMED] == {}


class Died(BaseException):
    """Stands in for SIGKILL."""


@pytest.mark.parametrize(("moment", "taken"), [(CLAIMED, 5), (SENT, 10)])
def test_it_dies_when_it_has_had_enough_messages(
    moment: str, taken: int, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGKILL)
        raise Died

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(random.Random, "random", lambda _: 1.0)
    relay = unlucky(broker, tmp_path, moment=moment, life=6)
    assert relay.send(MESSAGES) == []
    with pytest.raises(Died):
        relay.send(MESSAGES)
    assert len(broker.taken) == taken
    assert read_notes(tmp_path, "relay")[CONFIRMED].total() == 5
