"""What one process remembers of its lanes: nothing is lost or taken twice, and keys keep their order."""

import random

import pytest

from txbox_workers.postgres.backlog import LaneBacklog, LaneOrigin, WaitingMessage


class Outbox:
    """The table, as the backlog is told of it, and what happens to the messages in it."""

    def __init__(self, backlog: LaneBacklog, chance: random.Random, *, ordered: bool) -> None:
        self.backlog, self.chance, self.ordered = backlog, chance, ordered
        self.rows: dict[int, WaitingMessage] = {}
        self.held: dict[int, float] = {}  # failed messages that hold their keys, and when they are due
        self.asleep: dict[int, float] = {}  # failed messages of no order, and when they are due
        self.applied: list[WaitingMessage] = []
        self.in_hand: list[list[WaitingMessage]] = []
        self.now, self.last = 0.0, 0

    def publish(self, count: int) -> None:
        fresh: dict[int, int] = {}
        for _ in range(count):
            self.last += 1
            key = self.chance.choice(["a", "b", "c", "d", None])
            lane = 0 if key is None else ord(key) % 3
            self.rows[self.last] = WaitingMessage(
                lane, self.last, "", 1, f"m{self.last}", b"", key, "{}", 0, None, None
            )
            fresh.setdefault(lane, self.last)
        self.backlog.found(fresh)

    def claim(self, lanes: list[int]) -> None:
        self.backlog.add(dict.fromkeys(lanes, LaneOrigin()))

    def look(self) -> None:
        """Read as the source does, in small pieces."""
        again = self.backlog.due(self.now, 4)
        if self.chance.random() < 0.05:
            self.start_over()
            return
        self.backlog.fetched(again, [self.rows[at] for at in sorted(again) if at in self.rows], self.now)
        for position in [at for at, due in self.asleep.items() if due <= self.now]:
            del self.asleep[position]  # it is published again, at the end
            old = self.rows.pop(position)
            self.last += 1
            self.rows[self.last] = old._replace(position=self.last)
            self.backlog.found({old.lane: self.last})
        wanted = self.backlog.to_read()
        if not wanted:
            return
        fresh = [
            row._replace(due_in=max(self.held[at] - self.now, 0.0)) if at in self.held else row
            for at, row in sorted(self.rows.items())
            if at not in self.asleep and row.lane in wanted
        ]
        found = []
        for lane, start in wanted.items():
            found += [row for row in fresh if row.lane == lane and row.position >= start][:3]
        found.sort(key=lambda row: row.position)
        cut = found if self.chance.random() < 0.8 else found[: len(found) // 2]
        if self.chance.random() < 0.3:
            self.settle()  # while the read is on its way
        if self.chance.random() < 0.05:
            self.start_over()
            return
        self.backlog.read(wanted, cut, each_limit=3, cut=len(cut) < len(found), now=self.now)

    def start_over(self) -> None:
        """Claim all lanes again, after an error of the connection."""
        self.backlog.lose(set(self.backlog.lanes))
        self.claim([0, 1, 2])

    def take(self) -> None:
        if rows := self.backlog.take(self.chance.randint(1, 5)):
            keys = [row.key for row in rows if row.key is not None]
            if self.ordered:
                busy = {row.key for batch in self.in_hand for row in batch}
                assert not busy & set(keys), "of each key, one take is in hand at a time"
            self.in_hand.append(rows)

    def settle(self) -> None:
        """End a batch as a worker does: what fails blocks what is behind it in its key."""
        if not self.in_hand:
            return
        batch = self.in_hand.pop(self.chance.randrange(len(self.in_hand)))
        blocked: set[str | None] = set()
        for row in batch:
            delay = self.chance.choice([0.0, 3.0])
            if self.ordered and row.key in blocked and row.key is not None:
                self.backlog.hand_back(row.position, self.now + delay, self.now)
            elif self.chance.random() < 0.7:
                self.backlog.settle(row.position, self.now)
                del self.rows[row.position]
                self.held.pop(row.position, None)
                self.applied.append(row)
            elif self.ordered and row.key is not None:
                blocked.add(row.key)
                if self.chance.random() < 0.5:
                    self.held[row.position] = self.now + delay
                self.backlog.hand_back(row.position, self.now + delay, self.now)
            else:
                self.asleep[row.position] = self.now + delay
                self.backlog.settle(row.position, self.now)

    def share(self) -> None:
        """Lose lanes, give lanes away, and get them back."""
        if self.chance.random() < 0.5:
            self.backlog.drain(self.chance.randint(0, 3))
            self.backlog.drained()
        elif not self.in_hand:  # what is in hand of a lane that is lost, others may take: that is the inbox's matter
            self.backlog.lose(set(self.chance.sample(range(3), 1)))
        self.claim([lane for lane in range(3) if lane not in self.backlog.lanes])


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("seed", range(150))
def test_each_message_is_taken_until_it_is_settled_and_keys_keep_their_order(seed: int, ordered: bool) -> None:
    chance = random.Random(seed)
    backlog = LaneBacklog(ordered=ordered, ahead=3)
    outbox = Outbox(backlog, chance, ordered=ordered)
    outbox.claim([0, 1, 2])
    for _ in range(300):
        what = chance.choice(["publish", "look", "look", "take", "take", "settle", "settle", "share", "wait"])
        if what == "publish":
            outbox.publish(chance.randint(1, 4))
        elif what == "wait":
            outbox.now += 1
        elif what != "share" or chance.random() < 0.3:
            getattr(outbox, what)()
    for _ in range(3_000):
        backlog.drained()
        outbox.claim([lane for lane in range(3) if lane not in backlog.lanes])
        outbox.look()
        outbox.take()
        outbox.settle()
        outbox.now += 1
    assert outbox.rows == {}, "everything is processed"
    assert len({row.message_id for row in outbox.applied}) == len(outbox.applied)
    if ordered:
        for key in "abcd":
            positions = [row.position for row in outbox.applied if row.key == key]
            assert positions == sorted(positions)
    assert not backlog._known
    assert not backlog._keys
    assert not backlog._in_hand
    assert not backlog._ready


@pytest.mark.parametrize("ordered", [True, False])
def test_a_head_that_this_process_did_not_postpone_is_taken_once_it_is_due(ordered: bool) -> None:
    backlog = LaneBacklog(ordered=ordered, ahead=3)
    backlog.add({1: LaneOrigin()})
    backlog.wake([(1, 7, "a"), (2, 8, "a")], now=5.0)
    assert backlog.due(5.0, 10) == {7: 1}, "and none of a lane that others work on"
    row = WaitingMessage(1, 7, "", 1, "m7", b"", "a", "{}", 1, None, None)
    backlog.fetched({7: 1}, [row], 5.0)
    backlog.wake([(1, 7, "a")], now=6.0)
    assert backlog.take(10) == [row]
    backlog.wake([(1, 7, "a")], now=7.0)
    backlog.settle(7, 7.0)
    assert backlog.due(8.0, 10) == {}
