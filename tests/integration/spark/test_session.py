"""A real Spark reads the inbox over JDBC."""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, make_url

from txbox import Inbox
from txbox_spark import spark_session


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    session = spark_session("txbox-tests", master="local[1]", settings={"spark.ui.enabled": "false"})
    yield session
    session.stop()


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_spark_reads_what_a_worker_has_recorded(spark: Any, engine: Engine, schema_url: str) -> None:
    with engine.begin() as connection:
        Inbox("billing").record_many(connection, [f"message-{number}" for number in range(100)])
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
    url = make_url(schema_url)
    frame = (
        spark.read.format("jdbc")
        .option("url", f"jdbc:postgresql://{url.host}:{url.port}/{url.database}")
        .option("driver", "org.postgresql.Driver")
        .option("user", url.username)
        .option("password", url.password or "")
        .option("dbtable", f"{schema}.processed_message")
        .load()
    )
    assert frame.filter("subscriber_id = 'billing'").select("message_id").distinct().count() == 100
