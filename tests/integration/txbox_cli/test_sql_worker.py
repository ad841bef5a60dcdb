"""``txbox worker --queue … --apply …``: a worker without a line of Python, in two processes."""

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Engine, make_url

from support.program import Running
from support.waiting import wait_until
from txbox_aws.sqs import queue_backlog

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

ACCOUNT_SQL = """
INSERT INTO account SELECT customer_id, sum(cents) FROM fresh_event GROUP BY customer_id ORDER BY customer_id
ON CONFLICT (customer_id) DO UPDATE SET cents = account.cents + excluded.cents;
SELECT customer_id AS key, message_id AS body FROM fresh_event
"""


def test_it_applies_and_publishes_each_message_once_and_parks_what_is_malformed(
    tmp_path: Path, queue: str, schema_url: str, engine: Engine, sqs: "SQSClient", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TXBOX_DATABASE_URL", raising=False)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE account (customer_id text PRIMARY KEY, cents bigint NOT NULL)")
    (tmp_path / "account.sql").write_text(ACCOUNT_SQL)
    for number, cents in enumerate([1, 20, 300, 300, "many"]):
        attributes = {"message-id": {"DataType": "String", "StringValue": f"id {min(number, 2 + number // 4)}"}}
        body = json.dumps({"customer": {"id": "ann"}, "cents": cents})
        sqs.send_message(QueueUrl=queue, MessageBody=body, MessageAttributes=attributes)
    url = make_url(schema_url).render_as_string(hide_password=False)
    what = ["--queue", queue, "--subscriber", "billing", "--apply", "account.sql", "--url", url]
    fields = ["--fields", "customer_id text at /customer/id, cents bigint not null"]
    more = ["--publish-to", "own:mails", "--threads", "2", "--batch-size", "5", "--processes", "2"]
    with Running("worker", *what, *fields, *more, cwd=tmp_path) as running:
        running.says(f"billing works on {queue} in 2 processes; Ctrl-C drains and stops")
        wait_until(lambda: not any(queue_backlog(queue).values()))
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT * FROM account").all() == [("ann", 321)]
        published = connection.exec_driver_sql(
            "SELECT destination, key, convert_from(body, 'utf8') FROM outbox_message"
        )
        assert sorted(published) == [("own:mails", "ann", f"id {number}") for number in range(3)]
    assert running.out[-1] == "stopped: 1 dead, 1 duplicate, 3 processed\n"
