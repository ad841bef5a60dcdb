"""The trial: delivers a message once undisturbed, and then with each fault. All must lead to the same state."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine

from txbox import Message, Outcome
from txbox_testing.comparison import State, described, differences, plural, unlike, values_of
from txbox_testing.database import TrialDatabase, where_txbox_is
from txbox_testing.faults import (
    FAULT_ATTEMPTS,
    TIMEOUT_SECONDS,
    Fault,
    crash_at,
    delay,
    duplicate,
    lose_ack,
    lose_commit,
    lose_commit_answer,
    overtake,
)
from txbox_testing.stages.life import Life
from txbox_testing.stages.stage import NotSettled, quiet
from txbox_testing.stages.worker_stage import Handler, WorkerStage

SHARE_THE_TRANSACTION = (
    "Rows that are doubled or lost were not written through the session that the handler is given. Write them through "
    "it, so that they are committed with the message, or not at all."
)
SHARE_THE_CHUNK = (
    "Rows that are doubled or lost were not written by the load's `apply`. Write them there, so that they are "
    "committed with their chunk, or not at all."
)
SHARE_THE_ID = (
    "Effects that are doubled were outside of the database, where no rollback reaches. Publish them to the outbox in "
    "the handler's transaction; or send them with message.id as their idempotency key, and have the receiver refuse "
    "it the second time."
)

LOOK_BEFORE = (
    "Effects that are doubled may have happened in an attempt before: where lease.unknown_attempts is not 0, ask the "
    "receiver before you repeat one; or send them with message.id as their idempotency key, and have it refuse that "
    "the second time."
)


class NotIdempotent(AssertionError):
    """A handler is not idempotent: faults lead to another state than an undisturbed delivery.

    Attributes:
        report: the points at which that happens, and what differs.
    """

    def __init__(self, report: "TrialReport") -> None:
        self.report = report
        super().__init__(str(report))


@dataclass(frozen=True, slots=True)
class PointResult:
    """What a fault has led to.

    Attributes:
        name: the call that makes the fault, such as ``crash_at("handled")``.
        title: what happens, in words.
        happened: False if it could not happen to this handler.
        differences: how the state differs from that after an undisturbed delivery; empty if it does not.
        outcomes: those of all deliveries.
    """

    name: str
    title: str
    happened: bool
    differences: tuple[str, ...]
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class TrialReport:
    """The result of a trial. Its text is for people.

    Attributes:
        handler: the handler's name.
        points: what each fault has led to, in the order of a delivery's life.
        ignored: the columns that were left out, such as times and serial numbers: ``table.column``.
        seconds: how long the trial took.
        leased: whether the handler works under a lease, without a transaction.
        of_load: whether a bulk load was tried.
    """

    handler: str
    points: tuple[PointResult, ...]
    ignored: tuple[str, ...]
    seconds: float
    leased: bool = False
    of_load: bool = False

    @property
    def failed(self) -> tuple[PointResult, ...]:
        """The points that led to another state."""
        return tuple(point for point in self.points if point.differences)

    @property
    def ok(self) -> bool:
        """Whether all points led to the same state."""
        return not self.failed

    def __str__(self) -> str:
        tried = [point for point in self.points if point.happened]
        if self.ok:
            lines = [f"{self.handler} is idempotent: {plural(len(tried), 'point')} lead to the same state"]
        else:
            failed = f"{len(self.failed)} of {plural(len(tried), 'point')} lead to another state"
            lines = [f"{self.handler} is not idempotent: {failed}"]
        for point in self.failed:
            lines.append(f"  {point.name}: {point.title}")
            lines += [f"      {difference}" for difference in point.differences]
        held = [point.name for point in tried if not point.differences]
        if not self.ok and held:
            lines.append(f"  the same state after: {', '.join(held)}")
        if len(tried) < len(self.points):
            untried = ", ".join(point.name for point in self.points if not point.happened)
            lines.append(f"  could not happen to it: {untried}")
        if self.ignored:
            lines.append(f"  left out, as they may differ: {', '.join(self.ignored)}")
        found = [difference for point in self.failed for difference in point.differences]
        if any(not difference.startswith(("effects", "not settled")) for difference in found):
            lines.append(SHARE_THE_CHUNK if self.of_load else SHARE_THE_TRANSACTION)
        if any(difference.startswith("effects") for difference in found):
            lines.append(LOOK_BEFORE if self.leased else SHARE_THE_ID)
        return "\n".join(lines)


MOST_STATEMENTS = 20
"""The most statements of a handler at which it is killed; later ones are left out."""

SAME_TWICE = (
    "Empty what the handler keeps in memory with reset=…; leave out a column whose values have to differ, such as a "
    'random text, with ignore=("table.column",).'
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine  # which needs greenlet


Effects = Callable[[], Iterable[object]] | Collection[object]


def try_every_point(
    handler: Handler,
    *messages: Message,
    engine: "Engine | AsyncEngine",
    effects: Effects = (),
    reset: Callable[[], object] | None = None,
    faults: Sequence[Fault] | None = None,
    ignore: Collection[str] = (),
    batch: bool = False,
    timeout: float = TIMEOUT_SECONDS,
    **options: Any,
) -> TrialReport:
    """Try a handler at every point where a fault may happen. Raise unless all lead to the same state.

    The messages are delivered undisturbed, twice from the same rows, and then with each fault, and again until they are
    settled. Every table is compared, whoever has written to it, and so are effects outside the database. Between two
    points, every table is restored to the rows that it had. The two undisturbed deliveries must lead to the same rows.
    What may differ between them is left out: times, UUIDs, serial and generated numbers, foreign keys to these, and the
    columns of txbox's own tables.

    The trial needs the database for itself, as it ends all other sessions. It also needs a user that may set
    ``session_replication_role``, such as a superuser.

    Args:
        handler: as for ``deliver``.
        messages: the messages, delivered in this order.
        engine: the database, with txbox's tables and all that the handler needs.
        effects: what the handler does outside this database, by the text of each item: a list, a set or a dictionary
            that a fake fills, which is emptied before each point; or a function that returns what there is. Only what
            is new counts.
        reset: called before each point, for instance to empty a fake.
        faults: those to try; None: all that can happen to this handler.
        ignore: further columns to leave out, such as a random text: ``("table.column",)``.
        batch: whether the handler is called once for all messages.
        timeout: seconds within which the messages must be settled, for each fault.
        options: of ``txbox_workers.worker.Worker``; ``inbox`` is ``Inbox("test")`` by default.

    Returns:
        What each fault led to; all led to the same state.

    Raises:
        NotIdempotent: some led to another state. It says which, and what differs.
        ValueError: undisturbed, the handler fails or changes nothing, or two undisturbed deliveries differ: in the rows
            that they lead to, or in how many rows they change and how many statements they run.
        TypeError: something other than a message is to be delivered.
        InvalidConfiguration: an option cannot work, or the tables cannot be restored.
    """
    begun = time.monotonic()
    options = {"max_attempts": FAULT_ATTEMPTS, **options}
    with TrialDatabase(engine, *where_txbox_is(options)) as database:
        arguments = {"engine": engine, "timeout": timeout, "batch": batch, "options": options}
        trial = _Trial(handler, messages, database, _Effects(effects, reset), ignore, arguments)
        try:
            life = trial.learn()
            chosen = _faults_of(life, options) if faults is None else faults
            points = tuple(trial.point(fault) for fault in chosen)
        finally:
            database.restore()
    name = getattr(handler, "__qualname__", type(handler).__name__).rpartition("<locals>.")[2]
    return verdict(name, points, trial.ignored, begun, leased=options.get("inbox", True) is None)


def verdict(
    name: str, points: Iterable[PointResult], ignored: Mapping[str, frozenset[str]], begun: float, **kind: bool
) -> TrialReport:
    """Return the report of a trial that began at ``begun``; raise ``NotIdempotent`` if it has found another state."""
    left_out = tuple(f"{table}.{column}" for table, columns in ignored.items() for column in sorted(columns))
    report = TrialReport(name, tuple(points), left_out, time.monotonic() - begun, **kind)
    if not report.ok:
        raise NotIdempotent(report)
    return report


class _Trial:
    def __init__(
        self,
        handler: Handler,
        messages: Sequence[Message],
        database: TrialDatabase,
        effects: "_Effects",
        ignore: Collection[str],
        arguments: dict[str, Any],
    ) -> None:
        self._handler = handler
        self._messages = messages
        self._database = database
        self._effects = effects
        self._ignore = ignore
        self._arguments = arguments
        self.ignored: dict[str, frozenset[str]] = {}

    def learn(self) -> Life:
        """Deliver twice undisturbed, to learn the right state and what differs by itself. Return the first life."""
        self._before = self._database.read()
        stage, self._state, self._done = self._undisturbed("undisturbed")
        if not self._done and not differences(self._before, self._state, {}):
            raise ValueError(
                "undisturbed, it changed nothing: no row, and none of its effects; is an `await` missing, or are there "
                "no rows for this message?"
            )
        second, again, done_again = self._undisturbed("undisturbed for the second time, from the same rows")
        self.ignored = self._database.left_out(self._state, again, self._ignore)
        unequal = unlike(self._before, self._state, again, self.ignored)
        unequal += values_of(self._state, again, self.ignored)
        ran, ran_again = (len(each.lives[0].statements) for each in (stage, second))
        if ran != ran_again:
            unequal.append(f"{plural(ran_again, 'statement')} run in place of {ran}")
        if len(done_again) != len(self._done):
            unequal += _effect_line(self._done, done_again, count_only=True)
        if unequal:
            raise ValueError(
                "two undisturbed deliveries from the same rows lead to different states, so nothing can be compared: "
                f"{'; '.join(unequal)}. {SAME_TWICE}"
            )
        self._count_only = self._done != done_again
        return stage.lives[0]

    def _undisturbed(self, how: str) -> tuple[WorkerStage, State, list[str]]:
        stage, state, done, happened = self._run(_settle)
        if not happened:
            raise ValueError(f"{how}, it is not settled within {stage.timeout:g} s")
        failed = [each for each in stage.settled if each.outcome is not Outcome.PROCESSED]
        if failed:
            known = "; it was processed before this trial" if failed[0].outcome is Outcome.DUPLICATE else ""
            error = f": {failed[0].error}" if failed[0].error is not None else ""
            raise ValueError(f"{how}, {failed[0].message_id} is {failed[0].outcome}{known}{error}") from failed[0].error
        return stage, state, done

    def point(self, fault: Fault) -> PointResult:
        """Deliver with a fault, and compare."""
        stage, state, done, happened = self._run(fault.run)
        found = unlike(self._before, self._state, state, self.ignored)
        effects = _effect_line(self._done, done, self._count_only)
        if happened is None:
            found.append(f"not settled within {stage.timeout:g} s")
        outcomes = tuple(each.outcome for each in stage.settled)
        title = fault.title
        if stage.lives and stage.lives[0].statements and fault.name.startswith('crash_at("statement"'):
            title = f"{title}: {stage.lives[0].statements[-1]}"
        return PointResult(fault.name, title, happened is not False, (*found, *effects), outcomes)

    def _run(self, play: Callable[[WorkerStage], bool]) -> tuple[WorkerStage, State, list[str], bool | None]:
        """Play a delivery from the first rows. Return what is there after it."""
        self._database.restore()
        before = self._effects.begin()
        happened: bool | None
        with quiet(), WorkerStage(self._handler, self._messages, database=self._database, **self._arguments) as stage:
            try:
                happened = play(stage)
            except NotSettled:
                happened = None
            state = self._database.read()
            done = sorted((self._effects.read() - before).elements())
        return stage, state, done, happened


def _settle(stage: WorkerStage) -> bool:
    stage.settle()
    return True


def _faults_of(life: Life, options: dict[str, Any]) -> list[Fault]:
    """Return the faults that can happen to a handler, given the places that it has passed."""
    crashes = [
        crash_at(place, number)
        for place, number in dict.fromkeys(life.places)
        if number <= (MOST_STATEMENTS if place in ("statement", "closed") else 1)
    ]
    guarded = options.get("inbox", True) is not None and ("begun", 1) in life.places
    transactions = [lose_commit(), lose_commit_answer()] if guarded else []
    return [*crashes, *transactions, lose_ack(), duplicate(), duplicate(at_once=True), delay(), overtake()]


class _Effects:
    """What handlers have done outside the database."""

    def __init__(self, effects: Effects, reset: Callable[[], object] | None) -> None:
        self._effects = effects
        self._reset = reset

    def begin(self) -> Counter[str]:
        """Empty what can be emptied, and return what is left."""
        if self._reset is not None:
            self._reset()
        clear = getattr(self._effects, "clear", None)
        if clear is not None:
            clear()
        return self.read()

    def read(self) -> Counter[str]:
        """Return what is there now, as text."""
        found = self._effects() if callable(self._effects) else self._effects
        return Counter(repr(item) for item in (found.items() if isinstance(found, Mapping) else found))


def _effect_line(expected: list[str], done: list[str], count_only: bool) -> list[str]:
    if count_only:
        same = len(expected) == len(done)
        return [] if same else [f"effects: {len(done)} in place of {len(expected)}"]
    missing, surplus = Counter(expected) - Counter(done), Counter(done) - Counter(expected)
    parts = [f"{missing.total()} missing: {described(sorted(missing.elements()))}"] if missing else []
    parts += [f"{surplus.total()} too many: {described(sorted(surplus.elements()))}"] if surplus else []
    return [f"effects: {'; '.join(parts)}"] if parts else []
