"""A host's session may have engines of its own: by class (``binds``), or as its ``get_bind`` chooses.

What such a session does on one connection does not commit with what it does on another. ``bind_to`` makes a session
that we open work on one connection. ``keep_to`` refuses a second connection of a session that the host opened.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import UnboundExecutionError

from txbox.errors import InvalidConfiguration

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


def refuse_two_phases(factory: object, name: str) -> None:
    """Raise ``InvalidConfiguration`` for a sessionmaker with two-phase commits; ``name`` is the sessionmaker's."""
    if getattr(factory, "kw", {}).get("twophase"):
        raise InvalidConfiguration(f"{name} {_TWO_PHASES}")


def refuse_other_schemas(factory: object, engine: Any, name: str) -> None:
    """Raise ``InvalidConfiguration`` for a sessionmaker whose engine has a ``schema_translate_map`` that ours lacks.

    Its sessions get our connection, on which their effects would go to other schemas. Both engines may be async;
    ``name`` is the sessionmaker's.
    """
    own = _schemas_of(getattr(factory, "kw", {}).get("bind"))
    if own:
        _refuse_other_schemas(name, own, _schemas_of(engine))


def bind_to(session: "Session", target: Connection | Engine) -> None:
    """Make a session work on one connection wherever it would open one of the same engine, and refuse to open others.

    What a session does on another connection commits separately: a handler's effects without its message, or not at
    all, as the session is closed and not committed.

    Args:
        session: one that has not begun.
        target: the connection, or the engine from which it opens one. Engines that ``execution_options`` made of that
            engine count as the same, unless their ``schema_translate_map`` differs.

    Raises:
        InvalidConfiguration: the session uses two-phase commits. Later, from the session's own methods: it was about to
            open a connection of another engine, or one for other schemas.
    """
    if session.twophase:
        raise InvalidConfiguration(f"the session {_TWO_PHASES}")
    own: Any = session  # replaces its own method, whatever its class, its binds, or a method's caller chooses
    choose = own.get_bind

    def get_bind(*args: Any, **named: Any) -> Engine | Connection:
        chosen: Engine | Connection = choose(*args, **named)
        if chosen.engine.pool is target.engine.pool:
            _refuse_other_schemas("the session", _schemas_of(chosen), _schemas_of(target))
            return target
        raise InvalidConfiguration(
            f"the session has an engine of its own, {chosen.engine!r}, whose transactions do not commit with those of "
            f"{target.engine!r}, which txbox works in: make the session for that engine alone"
        )

    own.get_bind = get_bind


def bind_to_own(session: "Session", name: str) -> Connection | Engine:
    """Make a session work on one connection of its own engine, see ``bind_to``; return that engine or connection.

    That is what the session connects to where no class is named, or else the only engine in its ``binds``.

    Args:
        session: one that has not begun.
        name: what made it, for the error.

    Raises:
        InvalidConfiguration: it has no engine, or several and no default; and as for ``bind_to``.
    """
    try:
        target = session.get_bind()
    except UnboundExecutionError as error:
        engines = {bind.engine.pool: bind for bind in _binds(session).values()}
        if len(engines) != 1:
            raise InvalidConfiguration(
                f"{name} does not say which engine txbox is to work with: give it one beside its binds, "
                "sessionmaker(engine, binds=…)"
            ) from error
        target = session.bind = next(iter(engines.values())).engine
    bind_to(session, target)
    return target


def _schemas_of(bind: Any) -> Mapping[Any, Any]:
    return {} if bind is None else bind.get_execution_options().get("schema_translate_map") or {}


def _refuse_other_schemas(name: str, own: Mapping[Any, Any], ours: Mapping[Any, Any]) -> None:
    if own != ours:
        raise InvalidConfiguration(
            f"{name} has an engine with the schema_translate_map {own!r}, and txbox works with {ours!r}: make "
            "sessions and txbox's engine with one map, or name the schemas in the classes"
        )


def keep_to(session: "Session", connection: Connection) -> None:
    """Make a session refuse other connections in the transaction in which we write on this one.

    Args:
        session: the host's, in a transaction.
        connection: its own.

    Raises:
        InvalidConfiguration: it has another connection in this transaction. Later, from the session's own methods: it
            was about to open one.
    """
    if not _chooses(session):
        return
    transaction: Any = session.get_transaction()
    for other, *_ in transaction._connections.values():  # noqa: SLF001 - no other way
        _refuse_second(connection, other)
    if _WRITTEN not in session.info:
        event.listen(session, "after_begin", _refuse_others)
    session.info[_WRITTEN] = (transaction, connection)


def _chooses(session: "Session") -> bool:
    """Whether a session may have more than one engine."""
    from sqlalchemy.orm import Session

    return bool(_binds(session)) or type(session).get_bind is not Session.get_bind


def _binds(session: "Session") -> Mapping[Any, Engine | Connection]:
    return getattr(session, "binds", None) or getattr(session, "_Session__binds", None) or {}  # 2.1, 2.0


def _refuse_others(session: "Session", _: object, connection: Connection) -> None:
    transaction, written = session.info[_WRITTEN]
    if session.get_transaction() is transaction:
        _refuse_second(written, connection)


def _refuse_second(written: Connection, other: Connection) -> None:
    if other.connection.dbapi_connection is not written.connection.dbapi_connection:
        raise InvalidConfiguration(
            f"the session has a second connection in this transaction, of {other.engine!r}: what it does there does "
            f"not commit with what txbox writes over the one of {written.engine!r}. Give txbox the connection of the "
            "effect, session.connection(bind_arguments={'mapper': …})"
        )


_WRITTEN = "txbox_written"
"""Where a session that may have several engines keeps the transaction and the connection of our last write."""

_TWO_PHASES = "has twophase=True, but its transaction is the one that records the message: make it without twophase"
