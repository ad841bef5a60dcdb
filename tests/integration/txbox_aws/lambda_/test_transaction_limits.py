"""Limits of transactions: the server is told when the invocation ends."""

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from support.business import Business
from support.lambda_events import Context, of
from txbox import Inbox
from txbox_aws.lambda_ import sqs_handler


def settings(session: Session) -> dict[str, str]:
    names = ("transaction_timeout", "idle_in_transaction_session_timeout")
    return {name: session.execute(text(f"SELECT current_setting('{name}', true)")).scalar_one() for name in names}


def test_a_transaction_tells_the_server_when_the_invocation_ends(pool: Engine, business: Business) -> None:
    seen = []
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=lambda session, _: seen.append(settings(session)))
    handle(of("a"), Context(20))
    handle(of("b"), None)
    with pool.connect() as connection:
        after = settings(Session(connection))
    limits = [int(value.removesuffix("ms")) for value in seen[0].values() if value is not None]
    assert limits
    assert all(15_000 < limit <= 20_000 for limit in limits), seen
    assert set(seen[1].values()) <= {"0", None}, "without a deadline there is no limit"
    assert set(after.values()) <= {"0", None}, "and none is left behind in the connection"
