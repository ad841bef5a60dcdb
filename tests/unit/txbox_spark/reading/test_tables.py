"""What a source is, and that no text about it has a password; what Spark makes of one is tested with Spark."""

import time

import pytest

from txbox_spark import SourceError
from txbox_spark.reading.tables import check_source, without_secrets

OF_A_TABLE = {"dbtable": "purchase"}


@pytest.mark.parametrize(
    "source", ["table:archive.purchases", "delta:s3a://archive/purchases", "iceberg:lake.db.t", "table:`a:b`.t"]
)
def test_sources(source: str) -> None:
    assert check_source(source, {}) == source.partition(":")[0]
    assert check_source("jdbc:postgresql://db/shop", OF_A_TABLE) == "jdbc"
    assert check_source("jdbc:mysql://db/shop", {"QUERY": "SELECT 1"}) == "jdbc"


@pytest.mark.parametrize("source", ["purchases.jsonl", "table:", "hive:t", "s3a://archive", ":t", ""])
def test_what_is_no_source(source: str) -> None:
    with pytest.raises(SourceError, match="a source is table:NAME, delta:PATH"):
        check_source(source, {})


@pytest.mark.parametrize("options", [{}, {"user": "u"}, {"dbtable": "t", "query": "SELECT 1"}])
def test_a_database_needs_one_thing_to_read(options: dict[str, str]) -> None:
    with pytest.raises(SourceError, match="needs the option dbtable=NAME, or query") as raised:
        check_source("jdbc:postgresql://u:hunter2@db/shop", options)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("jdbc:postgresql://db/shop?user=u&password=hunter2&ssl=true", "jdbc:postgresql://db/shop?user=u&password=***&ssl=true"),
        ("jdbc:mysql://u:hunter2@db:3306/shop", "jdbc:mysql://u:***@db:3306/shop"),
        ("jdbc:mysql://u:hunter2:/@@db:3306/shop", "jdbc:mysql://u:***@db:3306/shop"),
        ("jdbc:oracle:thin:scott/hunter2@db:1521:x", "jdbc:oracle:thin:scott/***@db:1521:x"),
        ("jdbc:sqlserver://db;user=u;Password=hunter2;x=1", "jdbc:sqlserver://db;user=u;Password=***;x=1"),
        ("jdbc:x://db?sslpassword=hunter2", "jdbc:x://db?sslpassword=***"),
        ("cannot read jdbc:x://db?pwd=hunter2: no driver", "cannot read jdbc:x://db?pwd=*** no driver"),
        ("jdbc:snowflake://db?authenticator=o&token=hunter2", "jdbc:snowflake://db?authenticator=o&token=***"),
        ("jdbc:postgresql://db:5432/shop", "jdbc:postgresql://db:5432/shop"),
        ("delta:s3a://key:hunter2@archive/purchases", "delta:s3a://key:***@archive/purchases"),
        ("table:archive.purchases", "table:archive.purchases"),
        ("x://us?er:hunter2@db, y://db/x?mail=//u:hunter2@db", "x://us?er:***@db, y://db/x?mail=//u:***@db"),
        ("jdbc:x://db:1/y?mail=me@here&my_token_2=hunter2", "jdbc:x://db:1/y?mail=me@here&my_token_2=***"),
    ],
)  # fmt: skip
def test_no_text_has_a_password(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


@pytest.mark.parametrize("part", ["password", "//", "//x:y", "thin:", "//x:y?@", "a"])
def test_a_query_of_a_megabyte_is_searched_in_a_moment(part: str) -> None:
    query = part * ((1 << 20) // len(part))
    began = time.process_time()
    assert without_secrets(query) == query
    assert time.process_time() - began < 5
