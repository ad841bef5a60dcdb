"""The rights that the docs grant are enough to publish, to send, to keep and to park; and no more is needed."""

import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, make_url

from support.documents import blocks
from support.waiting import wait_until
from txbox import DeadLetters
from txbox.backoff import Backoff
from txbox.outbox import Outbox
from txbox.outbox.status import read_outbox_status
from txbox.relay import OutboxMessage, Refused, Relay

OPERATING = Path(__file__).parents[3] / "docs" / "operating.md"


class Picky:
    def send(self, messages: "list[OutboxMessage]") -> list[Refused]:
        return [Refused(message, "no") for message in messages if message.key == "refused"]


@pytest.fixture
def roles(schema_url: str, engine: Engine) -> Iterator[dict[str, Engine]]:
    """Engines of the roles that the docs create, by what the docs call them."""
    (grants,) = (block.text for block in blocks(OPERATING) if "txbox_publisher" in block.text)
    names = {name: f"{name}_{uuid.uuid4().hex[:8]}" for name in ("txbox_publisher", "txbox_relay")}
    with engine.begin() as connection:
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
        for name, role in names.items():
            grants = grants.replace(name, role)
        connection.exec_driver_sql(grants)
        connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema} TO {', '.join(names.values())}")
    url = make_url(schema_url)
    engines = {
        name: create_engine(url.update_query_dict({"options": f"-csearch_path={schema} -crole={role}"}))
        for name, role in names.items()
    }
    yield engines
    for one in engines.values():
        one.dispose()
    with engine.begin() as connection:
        for role in names.values():
            connection.exec_driver_sql(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_the_rights_that_are_granted_are_enough(engine: Engine, roles: dict[str, Engine]) -> None:
    outbox = Outbox()
    with roles["txbox_publisher"].begin() as connection:
        outbox.check(connection)
        for key, delay in (("fine", None), ("refused", None), ("refused", None), ("late", 0.1)):
            outbox.publish(connection, "own:x", "{}", key=key, delay=delay)
    relay = Relay(
        roles["txbox_relay"],
        {"own": Picky()},
        max_attempts=2,
        backoff=Backoff(first_seconds=0.01, longest_seconds=0.01),
        keep_sent=timedelta(milliseconds=1),
    )
    relay.start()
    try:
        wait_until(lambda: relay.sent == 2 and len(DeadLetters(engine).list()) == 2, "two are sent, two are parked")
        assert read_outbox_status(engine).relays
    finally:
        assert relay.stop()
    assert read_outbox_status(engine).messages == 0
    assert read_outbox_status(engine).relays == ()
