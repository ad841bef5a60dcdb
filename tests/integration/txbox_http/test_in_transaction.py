"""Requests with a key in the transaction, in all styles, by real connections to a real server."""

from collections import Counter
from collections.abc import Iterator

import httpx2
import pytest
from sqlalchemy import Engine, create_engine, make_url

from support.postgres.schemas import Schemas
from support.postgres.statements import run
from support.txbox.horizon import LONG_AGO, id_of, move_horizon
from support.web.service import STYLES, buy, served, service
from support.workers.business import Business
from txbox import Inbox
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox.schema import tables

PAGE = "https://shop.example/keys"
"""Where the service says what its keys are."""


class Shop:
    """A service, its client, and its tables."""

    def __init__(self, url: str, client: httpx2.Client) -> None:
        self.url, self.client = url, client
        self.engine = create_engine(url)
        self.business = Business(self.engine)

    def forget_all(self) -> None:
        """Forget what a test has done."""
        run(self.engine, "TRUNCATE processed_message, kept_response, inbox_horizon, effect")
        run(self.engine, "UPDATE account SET balance = 0")


@pytest.fixture(scope="module", params=STYLES)
def open_shop(database_url: str, schemas: Schemas, request: pytest.FixtureRequest) -> Iterator[Shop]:
    """A service of each style, which serves one test after the other."""
    name = schemas.take(with_business=True)
    url = make_url(database_url).update_query_dict({"options": f"-csearch_path={name}"})
    text = url.render_as_string(hide_password=False)
    with served(service(text, request.param, documentation=PAGE)) as client:
        shop = Shop(text, client)
        yield shop
        shop.engine.dispose()
    schemas.give_back(name)


@pytest.fixture
def shop(open_shop: Shop) -> Iterator[httpx2.Client]:
    """The client of a service that has done nothing yet."""
    yield open_shop.client
    open_shop.forget_all()


@pytest.fixture
def engine(open_shop: Shop) -> Engine:
    return open_shop.engine


@pytest.fixture
def business(open_shop: Shop) -> Business:
    return open_shop.business


def test_a_repeat_gets_status_headers_and_body_of_the_first_answer(shop: httpx2.Client, business: Business) -> None:
    first = buy(shop, "k1")
    again = [buy(shop, "k1") for _ in range(3)]

    assert business.applied() == {"tea": 1}
    assert (first.status_code, first.json(), first.headers["location"]) == (201, {"item": "tea"}, "/purchases/tea")
    assert "idempotent-replayed" not in first.headers
    for response in again:
        assert (response.status_code, response.content) == (201, first.content)
        assert response.headers["location"] == "/purchases/tea"
        assert response.headers["content-type"] == "application/json"
        assert response.headers["idempotent-replayed"] == "true"
        assert "set-cookie" not in response.headers  # a secret, which lies in no table


def test_what_is_answered_to_requests_that_are_not_run(shop: httpx2.Client, business: Business) -> None:
    buy(shop, "k1")
    other = buy(shop, "k1", "coffee")
    other_query = shop.post("/purchases?a=b", json={"item": "tea", "then": ""}, headers={"idempotency-key": "k1"})
    missing = buy(shop, None)
    blank = buy(shop, "a b")
    large = buy(shop, "k2", "x" * 1_100_000)
    answered_large = buy(shop, "k3", then="large")

    answers = {response.status_code: response for response in (missing, large, other, answered_large)}
    assert set(answers) == {400, 413, 422, 500}
    assert (other_query.status_code, blank.status_code) == (422, 400)
    for status, response in answers.items():
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["status"] == status
        assert response.headers["link"] == f'<{PAGE}>; rel="describedby"; type="text/html"'
        assert response.json()["type"].startswith(f"{PAGE}#")
    assert missing.json()["title"] == "Idempotency-Key is missing"
    assert other.json()["title"] == "Idempotency-Key is already used"
    assert business.applied() == {"tea": 1}


@pytest.mark.parametrize("then", ["raise", "409", "503", "large"])
def test_what_fails_leaves_nothing_and_its_key_is_free(shop: httpx2.Client, business: Business, then: str) -> None:
    failed = buy(shop, "k1", then=then)
    assert failed.status_code == (int(then) if then.isdigit() else 500)
    assert business.applied() == Counter()
    assert business.recorded() == set()

    assert buy(shop, "k1", "coffee").status_code == 201
    assert business.applied() == {"coffee": 1}


def test_callers_have_keys_of_their_own(shop: httpx2.Client, business: Business) -> None:
    ada = buy(shop, "k1", "tea", **{"x-user": "ada"})
    bob = buy(shop, "k1", "coffee", **{"x-user": "bob"})
    nameless = buy(shop, "k1", "milk")

    assert [response.json()["item"] for response in (ada, bob, nameless)] == ["tea", "coffee", "milk"]
    assert business.recorded() == {"ada k1", "bob k1", "k1"}
    assert buy(shop, "ada%20k1".replace("%20", " ")).status_code == 400  # what would be another caller's id is no key


def test_a_callers_key_from_before_the_horizon_is_refused(
    shop: httpx2.Client, business: Business, engine: Engine
) -> None:
    move_horizon(engine)
    expired = buy(shop, id_of(LONG_AGO), **{"x-user": "ada"})
    assert (expired.status_code, expired.json()["type"].rpartition("#")[2]) == (422, "key-expired")
    assert business.applied() == Counter()


def test_a_response_that_outlives_its_id_is_not_given_for_a_later_one(
    shop: httpx2.Client, business: Business, engine: Engine
) -> None:
    buy(shop, "k1")
    run(engine, "DELETE FROM processed_message")  # a maintainer has forgotten it, but not yet its response
    with engine.begin() as connection:
        Inbox("billing").record(connection, "k1")  # a worker processes a message of this id
    assert buy(shop, "k1").status_code == 204

    run(engine, "DELETE FROM processed_message")
    assert buy(shop, "k1", "coffee").status_code == 201
    assert buy(shop, "k1", "coffee").json() == {"item": "coffee"}


def test_a_message_that_waits_as_a_dead_letter_is_not_said_to_be_done(
    shop: httpx2.Client, business: Business, engine: Engine
) -> None:
    with engine.begin() as connection:
        connection.execute(
            tables().processed_message.insert().values(subscriber_id="billing", message_id="k1", dead_letter_id=1)
        )
    parked = buy(shop, "k1")
    assert (parked.status_code, parked.json()["type"].rpartition("#")[2]) == (409, "parked")
    assert business.applied() == Counter()


def test_an_inbox_that_rotates_keeps_responses_all_the_same(schema_url: str) -> None:
    engine = create_engine(schema_url)
    business = Business(engine)
    InboxConversion(engine).forward()
    with served(service(schema_url)) as client:
        first = buy(client, "k1")
        assert Generations(engine).rotate()
        again = buy(client, "k1")
    assert (again.content, again.headers["idempotent-replayed"]) == (first.content, "true")
    assert business.applied() == {"tea": 1}
    engine.dispose()
