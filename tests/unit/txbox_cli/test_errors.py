"""From exceptions to lines."""

import logging

import pytest
from sqlalchemy.exc import OperationalError

from txbox import BrokerError, TxboxError
from txbox.errors import ExtraMissing
from txbox_cli.app import _MaskingFormatter
from txbox_cli.errors import explain, mask, masked_traceback


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgresql://u:hunter2@h/x", "postgresql://u:***@h/x"),
        ("postgresql+psycopg://u:hunter2@h/x", "postgresql+psycopg://u:***@h/x"),
        ("see postgresql://:hunter2@h/x and http://a:hunter2@b", "see postgresql://:***@h/x and http://a:***@b"),
        ("postgresql://u:hunter/2@h/x", "postgresql://u:***@h/x"),
        ("postgresql://u:hunter@2@h/x", "postgresql://u:***@h/x"),
        ("postgresql://u@h/x?password=hunter2&sslmode=on", "postgresql://u@h/x?password=***&sslmode=on"),
        ("host=h user=u password=hunter2 dbname=x", "host=h user=u password=*** dbname=x"),
        ("postgresql://user:password@host:5432/database", "postgresql://user:password@host:5432/database"),
        ("http://127.0.0.1:4566/1/orders", "http://127.0.0.1:4566/1/orders"),
        ("mail a@b.example at 12:30", "mail a@b.example at 12:30"),
    ],
)
def test_passwords_are_masked(text: str, masked: str) -> None:
    assert mask(text) == masked


@pytest.mark.timeout(10)
@pytest.mark.parametrize("part", ["tea", "a://b:c", "a://b:@"])
def test_a_long_text_without_blanks_is_masked_in_no_time(part: str) -> None:
    assert mask(part * 70_000).endswith(part[-1])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (TxboxError("one\n two"), "one two"),
        (
            BrokerError("Could not connect to x"),
            "Could not connect to x; is it running, and is AWS_ENDPOINT_URL right?",
        ),
        (FileNotFoundError(2, "No such file", "/x"), "/x: No such file"),
        (OSError("odd"), "odd"),
        (UnicodeEncodeError("utf-8", "a\udcff\udcfeb", 1, 3, "no"), r"'\udcff\udcfe' is not UTF-8"),
        (ExtraMissing("aws", "boto3"), "boto3 is missing; install it: pip install '.[aws]' in a clone of txbox"),
        (
            ModuleNotFoundError("No module named 'x'", name="x"),
            "ModuleNotFoundError: No module named 'x'; this was not",
        ),
        (OperationalError("SELECT 1", {}, Exception("odd")), "odd; is the server running, and is the URL right?"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_one_line(error: Exception, line: str) -> None:
    assert explain(error).startswith(line)
    assert "\n" not in explain(error)


def test_a_database_error_behind_ours_is_explained() -> None:
    ours = TxboxError("the database cannot be used: [SQL: SELECT hunter2]")
    ours.__cause__ = RuntimeError("unavailable")
    ours.__cause__.__cause__ = OperationalError("SELECT 'hunter2'", {}, Exception("Connection refused"))
    assert explain(ours) == "Connection refused; start the server, or correct host and port in the URL"


def test_a_traceback_is_masked_through_all_its_causes() -> None:
    try:
        try:
            raise ValueError("postgresql://u:hunter2@h/x")
        except ValueError as error:
            raise TxboxError("no") from error
    except TxboxError as error:
        text = masked_traceback(error)
    assert "postgresql://u:***@h/x" in text
    assert "hunter2@" not in text.replace('raise ValueError("postgresql://u:hunter2@h/x")', "")


def test_log_lines_are_masked_with_their_tracebacks() -> None:
    try:
        raise ValueError("at postgresql://u:" + "hunter2@h/x")
    except ValueError as error:
        record = logging.LogRecord(
            "x", logging.ERROR, "f", 1, "no %s", ("postgresql://u:hunter2@h/x",), (type(error), error, None)
        )
    text = _MaskingFormatter().format(record)
    assert text.count("postgresql://u:***@h/x") == 2
    assert "hunter2" not in text
