"""What pages show of subscribers that have no worker: by the inbox, in either form, wherever its tables are."""

import re
from contextlib import closing

import pytest
from celery import Celery
from sqlalchemy import Engine
from starlette.testclient import TestClient

from support.postgres.roles import restricted
from support.postgres.statements import run
from support.postgres.tables import make_tables
from support.web.service import service
from support.workers.business import Business
from txbox import Inbox
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox_celery import inbox_task
from txbox_dashboard import dashboard
from txbox_dashboard.pages import inbox_activity
from txbox_dashboard.view import NONE

from .test_pages import text_of


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("place", [{}, {"schema": 'Odd "a"-%', "prefix": "Odd'%_"}])
def test_what_http_celery_and_services_did_is_shown(fresh_engine: Engine, place: dict[str, str], rotates: bool) -> None:
    make_tables(fresh_engine, place.get("schema"), place.get("prefix", ""))
    Business(fresh_engine)
    generations = Generations(fresh_engine, **place)
    assert not rotates or InboxConversion(fresh_engine, **place).forward()
    app = Celery("shop", broker="memory://", set_as_current=False)

    @inbox_task(app, inbox=Inbox("mailing", **place), engine=fresh_engine)
    def mail(_session: object) -> None: ...

    url = fresh_engine.url.render_as_string(hide_password=False)
    with TestClient(service(url, "sync dependency", inbox=Inbox("shop", **place))) as shop:
        for key in ("k1", "k2", "k2", "k3"):
            assert shop.post("/purchases", json={"item": key}, headers={"idempotency-key": key}).status_code == 201
            assert not rotates or key != "k1" or generations.rotate()
    with closing(app):
        assert [mail.apply((), task_id=f"t{number}").get() for number in (1, 2)] == [None, None]
    with fresh_engine.begin() as connection:
        Inbox("analytics", **place).record_many(connection, [f"m{number}" for number in range(600)])
    with TestClient(dashboard(fresh_engine, **place)) as pages:
        overview, page = text_of(pages, "/"), text_of(pages, "/subscriber?id=shop&hours=24+h")
        assert "None is at work." in text_of(pages, "/subscriber?id=none-such")
    for name, rate, count in (("analytics", "10", "600"), ("mailing", "0.033", "2"), ("shop", "0.05", "3")):
        assert f"{name} without a worker {rate} {count} {NONE} {NONE} {NONE} 0 0" in overview
    assert "processed 3 in 24 h, by the inbox Workers Without a worker: an HTTP service" in page


def test_of_a_part_it_is_said_that_there_is_more(
    pages: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old and the parked ones count nowhere; those before the last two blocks are not read."""
    run(
        engine,
        "INSERT INTO processed_message (subscriber_id, message_id, processed_at, dead_letter_id) SELECT 's', 'm' || n, "
        "now() - CASE WHEN n > 990 THEN interval '4 h' ELSE '0' END, CASE WHEN n > 980 THEN n END "
        "FROM generate_series(1, 1000) AS n",
    )
    assert "s without a worker 16 980" in text_of(pages, "/")
    monkeypatch.setattr(inbox_activity, "LOOKED_AT_BLOCKS", 2)
    [found] = re.findall(r"s without a worker [\d.]+ at least (\d+) ", text_of(pages, "/"))
    assert 50 < int(found) < 980
    assert f"processed at least {found} in 3 h" in text_of(pages, "/subscriber?id=s")


def test_a_role_that_may_read_the_inbox_needs_no_right_to_its_generations(engine: Engine) -> None:
    with engine.begin() as connection:
        Inbox("shop").record(connection, "1")
    with restricted(engine) as limited:
        assert InboxConversion(engine).forward()
        assert Generations(engine).rotate()
        with engine.begin() as connection:
            Inbox("shop").record(connection, "2")
        with TestClient(dashboard(limited)) as pages:
            assert "shop without a worker 0.033 2" in text_of(pages, "/")
