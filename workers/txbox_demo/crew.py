"""The crew: the processes of all roles, of which some are killed again and again, and replaced."""

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from txbox import TxboxError
from txbox_demo import billing, notification, relay_process, shop_process, worker_process
from txbox_demo.fork_server import ForkServer
from txbox_demo.orders import Orders

__all__ = ["ANYWHERE", "BILLING", "NOTIFICATION", "RELAY", "ROLES", "SHOP", "Crew", "Role", "Team"]

ANYWHERE = "anywhere"
"""Where a process dies that is killed from outside, at any instant. It kills itself at all other moments."""


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of process.

    Attributes:
        name: what it is.
        moments: where its processes die, in turn.
        journal_bytes: what it writes down about each message.
        ends: whether its processes come to an end by themselves, when everything is done.
    """

    name: str
    moments: tuple[str, ...]
    journal_bytes: int
    ends: bool = False


_BILLING_MOMENTS = (worker_process.HANDLING, worker_process.COMMITTED, ANYWHERE, worker_process.RECEIVED)
_NOTIFICATION_MOMENTS = (
    worker_process.SENT,
    worker_process.COMMITTED,
    ANYWHERE,
    worker_process.SENDING,
    worker_process.RECEIVED,
)

SHOP = Role("shop", (shop_process.INSERTED, ANYWHERE), journal_bytes=20, ends=True)
RELAY = Role("relay", (relay_process.SENT, ANYWHERE, relay_process.CLAIMED), journal_bytes=80)
BILLING = Role(billing.SUBSCRIBER, _BILLING_MOMENTS, journal_bytes=90)
NOTIFICATION = Role(notification.SUBSCRIBER, _NOTIFICATION_MOMENTS, journal_bytes=240)
ROLES = (SHOP, RELAY, BILLING, NOTIFICATION)


@dataclass(slots=True)
class Team:
    """The processes of one role.

    Attributes:
        role: their role.
        members: how many at a time.
        kills: how many are to be killed.
        messages: about how many messages all of them together see.
        killed: how many were, by moment.
        started: how many were started.
    """

    role: Role
    members: int
    kills: int = 0
    messages: int = 0
    killed: dict[str, int] = field(default_factory=dict)
    started: int = 0

    def __post_init__(self) -> None:
        self.killed = dict.fromkeys(self.role.moments, 0)

    @property
    def kills_total(self) -> int:
        """How many were killed."""
        return sum(self.killed.values())

    @property
    def messages_per_life(self) -> float:
        """About how many messages a member sees before it is killed."""
        return self.messages / (max(self.members, self.kills) * _SPARE)


@dataclass(slots=True)
class _Member:
    team: Team
    orders: Orders
    killed_from_outside: bool = False


class Crew:
    """Keeps the processes of all teams alive, and has each die after a while until enough have died."""

    def __init__(self, server: ForkServer, teams: Sequence[Team], orders: Orders) -> None:
        """Prepare; ``tend`` starts the processes.

        Args:
            server: forks them.
            teams: which processes, and how many.
            orders: what is the same for all of them; the seed is that of the random choices here.
        """
        self.teams = tuple(teams)
        self._server = server
        self._orders = orders
        self._random = random.Random(orders.seed)  # noqa: S311 - choices of the demo, no secrets
        self._members: list[_Member] = []
        self._done: set[tuple[str, int]] = set()
        self._killed: set[str] = set()

    @property
    def kills_total(self) -> int:
        """How many processes were killed, of all roles."""
        return sum(team.kills_total for team in self.teams)

    @property
    def started(self) -> int:
        """How many processes were started, of all roles."""
        return sum(team.started for team in self.teams)

    @property
    def killed(self) -> frozenset[str]:
        """The names of the processes that were killed (``Orders.process``), those too that were so at the stop."""
        return frozenset(self._killed)

    def is_done(self, role: Role) -> bool:
        """Whether every process of a role has come to its end."""
        return all((role.name, slot) in self._done for team in self._of(role) for slot in range(team.members))

    def tend(self) -> None:
        """Bury the dead, kill whose time has come, start who is missing. Called again and again.

        Raises:
            TxboxError: a process ended that was not killed.
        """
        for member in list(self._members):
            status = self._server.status(member.orders)
            if status is not None:
                self._bury(member, status)
            elif member.orders.moment == ANYWHERE and not member.killed_from_outside:
                member.killed_from_outside = self._kill_if_old(member)
        for team in self.teams:
            taken = {member.orders.slot for member in self._members if member.team is team}
            for slot in range(team.members):
                if slot not in taken and (team.role.name, slot) not in self._done:
                    self._members.append(self._start(team, slot))

    def stop(self, timeout: float = 30.0) -> None:
        """Have every process drain and end; one that does not in time is killed, and its messages come again."""
        self._end(signal.SIGTERM, timeout)
        self._end(signal.SIGKILL, timeout)

    def _end(self, number: signal.Signals, timeout: float) -> None:
        for member in self._members:
            self._server.signal(member.orders, number)
            if number == signal.SIGKILL:
                self._killed.add(member.orders.process)
        late = self._server.wait([member.orders for member in self._members], timeout)
        self._members = [member for member in self._members if member.orders in late]

    def _of(self, role: Role) -> list[Team]:
        return [team for team in self.teams if team.role is role]

    def _start(self, team: Team, slot: int) -> _Member:
        team.started += 1
        # A process dies only while there are deaths to die; those alive already have theirs foretold.
        foretold = sum(bool(member.orders.moment) for member in self._members if member.team is team)
        doomed = team.kills_total + foretold < team.kills
        moments = team.role.moments
        orders = replace(
            self._orders,
            role=team.role.name,
            number=team.started,
            slot=slot,
            slots=team.members,
            moment=moments[(team.started - 1) % len(moments)] if doomed else "",
            life=max(1, round(team.messages_per_life * self._random.uniform(0.5, 1.5))),
            seed=self._random.randrange(2**32),
        )
        self._server.fork(orders)
        return _Member(team, orders)

    def _kill_if_old(self, member: _Member) -> bool:
        if _size(member.orders.journal) < member.orders.life * member.team.role.journal_bytes:
            return False
        self._server.signal(member.orders, signal.SIGKILL)
        return True

    def _bury(self, member: _Member, status: int) -> None:
        self._members.remove(member)
        team, orders = member.team, member.orders
        if status == -signal.SIGKILL and orders.moment:
            team.killed[orders.moment] += 1
            self._killed.add(orders.process)
        elif status == 0 and team.role.ends:
            self._done.add((team.role.name, orders.slot))
        else:
            said = orders.log.read_text(errors="replace").strip().splitlines() if orders.log.exists() else []
            raise TxboxError(
                f"{orders.name} ended by itself with status {status}: {said[-1] if said else 'it said nothing'}"
            )


_SPARE = 2.0
"""Lives are planned shorter than kills alone would have them, so that no share of the work ends before its kills."""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
