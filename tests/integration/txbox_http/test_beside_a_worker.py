"""A message from SQS and an HTTP request with the same id: applied once, whichever comes first."""

from typing import TYPE_CHECKING

from fastapi import Response
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session, sessionmaker
from starlette.requests import Request

from support.aws.queues import send, wait_until_empty
from support.web.service import buy, served, service
from support.workers.business import APPLY, Business
from support.workers.memory_worker import at_work
from txbox import Inbox, Message
from txbox_aws.sqs import SqsWorker
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, everyone, posts_and_patches

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient


def test_what_came_by_sqs_is_not_done_again_by_a_request_and_the_other_way_round(
    engine: Engine, schema_url: str, business: Business, sqs: "SQSClient", queue: str
) -> None:
    def handle(session: Session, message: Message) -> None:
        session.execute(APPLY, {"id": "by a message", "body": ""})

    worker = SqsWorker(queue, inbox=Inbox("billing"), engine=engine, handler=handle, wait_seconds=1)
    with served(service(schema_url)) as client, at_work(worker):
        assert buy(client, "k1", "by a request").status_code == 201
        send(sqs, queue, ["k1", "k2"])
        wait_until_empty(sqs, queue)
        late = buy(client, "k2", "by a request")

    assert (late.status_code, late.content, late.headers["idempotent-replayed"]) == (204, b"", "true")
    assert business.applied() == {"by a request": 1, "by a message": 1}


def test_the_service_may_say_itself_what_is_there(engine: Engine, schema_url: str, business: Business) -> None:
    def processed(request: Request, session: Session) -> Response:
        balance = session.connection().exec_driver_sql("SELECT balance FROM account WHERE account_id = 1").scalar_one()
        return Response(f"the balance is {balance}", 200)

    with engine.begin() as connection:
        Inbox("billing").record(connection, "k1")
    own = create_engine(schema_url)
    once = Idempotency(InTransaction(sessionmaker(own), Inbox("billing"), processed=processed), caller=everyone)

    async def unreachable(*_: object) -> None:
        raise AssertionError

    with served(IdempotencyMiddleware(unreachable, once, covers=posts_and_patches)) as client:
        answer = buy(client, "k1")
    own.dispose()
    assert (answer.status_code, answer.text) == (200, "the balance is 0")
