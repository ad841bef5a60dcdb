"""Journals: what a killed process leaves behind can be read."""

import os
from pathlib import Path

import pytest

from txbox import Outcome
from txbox.instrumentation import Committed, Received, Settled
from txbox_demo.journal import Journal, read_diaries, read_journals, read_notes

WHO = ("billing", "queue")
RECEIVED = Received(*WHO, ("m-1", "m-2"), ("r-1", "r-2"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "billing-001.journal"


def write(path: Path, *events: object) -> None:
    journal = Journal(path)
    for event in events:
        journal(event)  # type: ignore[arg-type]
    journal.close()


def settled(message: str, receipt: str, outcome: Outcome = Outcome.PROCESSED) -> Settled:
    return Settled(*WHO, message, receipt, outcome, True, 1)


@pytest.mark.parametrize("outcome", Outcome)
def test_what_is_written_is_read(path: Path, outcome: Outcome) -> None:
    write(path, RECEIVED, Committed(*WHO, 1, 0, 0.1), settled("m-1", "r-1", outcome))
    sightings = read_journals(path.parent, "billing")
    assert sorted(sightings.received.values()) == ["m-1", "m-2"]
    (delivery,) = sightings.outcomes
    assert sightings.received[delivery] == "m-1"
    assert sightings.outcomes[delivery] is outcome


def test_all_processes_of_a_role_are_read_together_and_other_files_are_not(path: Path) -> None:
    write(path, RECEIVED)
    write(path.with_name("notification-001.journal"), Received(*WHO, ("m-3",), ("r-3",)))
    write(path.with_name("billing-002.journal"), Received(*WHO, ("m-1",), ("r-9",)), settled("m-1", "r-9"))
    path.with_name("billing-001.log").write_text("no journal\n")
    sightings = read_journals(path.parent, "billing")
    assert sorted(sightings.received.values()) == ["m-1", "m-1", "m-2"]
    assert len(sightings.outcomes) == 1


def test_an_id_with_blanks_comes_back_whole(path: Path) -> None:
    write(path, Received(*WHO, ("order 7 of 9",), ("r-1",)))
    assert list(read_journals(path.parent, "billing").received.values()) == ["order 7 of 9"]


def test_an_empty_journal_holds_nothing(path: Path) -> None:
    write(path)
    assert read_journals(path.parent, "billing").received == {}


def test_wherever_the_last_write_is_torn_the_rest_is_read(path: Path) -> None:
    write(path, RECEIVED)
    before = path.stat().st_size
    write(path, settled("m-1", "r-1"))
    whole = path.read_bytes()
    for size in range(before, len(whole)):
        path.write_bytes(whole[:size])
        sightings = read_journals(path.parent, "billing")
        assert len(sightings.received) == 2
        assert sightings.outcomes == {}


def test_a_short_write_is_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write_all(file, data[:7]))
    write(path, RECEIVED)
    assert sorted(read_journals(path.parent, "billing").received.values()) == ["m-1", "m-2"]


def test_notes_are_counted_by_what_has_happened(path: Path) -> None:
    for number, names in enumerate((["a", "b c"], ["a"]), start=1):
        journal = Journal(path.with_name(f"relay-{number:03}.journal"))
        journal.note("handed", names)
        journal.note("confirmed", names[:1])
        journal.close()
    notes = read_notes(path.parent, "relay")
    assert notes["handed"] == {"a": 2, "b c": 1}
    assert notes["confirmed"] == {"a": 2}
    assert read_notes(path.parent, "shop")["placed"] == {}


def test_deliveries_and_notes_of_one_process_do_not_get_mixed_up(path: Path) -> None:
    write(path, RECEIVED, settled("m-1", "r-1"), settled("m-1", "r-2", Outcome.IN_FLIGHT))
    for journal in (Journal(path), Journal(path.with_name("billing-002.journal"))):
        journal.note("sending", ["m-1", "order 7 of 9"])
        journal.close()
    diaries = read_diaries(path.parent, "billing")
    assert diaries.keys() == {"billing-001", "billing-002"}
    assert diaries["billing-001"].outcomes == {"m-1": {Outcome.PROCESSED: 1, Outcome.IN_FLIGHT: 1}}
    assert diaries["billing-002"].outcomes == {}
    for diary in diaries.values():
        assert diary.notes == {"sending": {"m-1": 1, "order 7 of 9": 1}}
    sightings = read_journals(path.parent, "billing")
    assert (len(sightings.received), len(sightings.outcomes)) == (2, 2)
    assert read_notes(path.parent, "billing") == {"sending": {"m-1": 2, "order 7 of 9": 2}}
