"""What is said of an error of Postgres or Spark: one line with the cause, and no data."""

import pytest

from txbox_spark.runtime.explanations import (
    describe_spark_error,
    is_about_lost_executors,
    is_out_of_memory,
    text_of,
    without_values,
)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ('invalid input syntax for type uuid: "a "b" secret"', "invalid input syntax for type uuid"),
        ('value "99999999999" is out of range for type integer', "value … is out of range for type integer"),
        ("ungültige Eingabesyntax für Typ integer: »x«", "ungültige Eingabesyntax für Typ integer"),
        ("division by zero", "division by zero"),
        ('duplicate key value violates unique constraint "effect_pkey"',) * 2,
        ('null value in column "a" of relation "b" violates not-null constraint',) * 2,
    ],
)
def test_values_are_left_out(message: str, said: str) -> None:
    assert without_values(message) == said


FAILED = (
    "An error occurred while calling o1.collect.\n: org.apache.spark.SparkException: Job aborted due to stage failure: "
)
TASK = f"{FAILED}Task 0 in stage 3.0 failed 4 times, most recent failure: Lost task 0.3 in stage 3.0 (h executor 4): "
STAGE = (
    f"{FAILED}ResultStage 5 (collect) has failed the maximum allowable number of times: 4. Most recent failure reason:"
)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (f"{TASK}ExecutorLostFailure (executor 4 exited caused by one of the running tasks) Reason: 137\nDriver", True),
        (f"{STAGE}\norg.apache.spark.shuffle.MetadataFetchFailedException: Missing an output location", True),
        (f"{TASK}org.apache.spark.SparkException: a\n\tat x\nCaused by: ExecutorLostFailure", False),
        (f"{TASK}java.sql.BatchUpdateException: ERROR: division by zero", False),
        ("ExecutorLostFailure", False),
    ],
)
def test_what_lost_executors_have_caused(text: str, lost: bool) -> None:
    assert is_about_lost_executors(text) is lost


UNREAD = """An error occurred while calling o1.collect.
: org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file {file}.  SQLSTATE: 0
\tat org.apache.spark.Some.thing(Some.scala:1)
Caused by: java.lang.RuntimeException: it
Caused by: java.io.EOFException: Unexpected end of input stream
\tat java.base/java.lang.Thread.run(Thread.java:840)"""


@pytest.mark.parametrize("file", ["file:///a.b/c.csv.gz", "s3a://bucket/with space/a.parquet"])
def test_a_file_that_cannot_be_read(file: str) -> None:
    assert describe_spark_error(UNREAD.format(file=file)) == (
        f"the file {file} cannot be read (Unexpected end of input stream); "
        "if it is cut off or damaged, write it again, or leave it out"
    )


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        ("CSV header does not conform to the schema.", "its header must name the columns of the other files"),
        ("Number of column in CSV header is not equal to number of fields in the schema:", "its header must name"),
        ("column: [at], physicalType: INT64, logicalType: timestamp", "in the schema, give the column a type that"),
    ],
)
def test_a_file_that_is_whole_and_does_not_fit(cause: str, remedy: str) -> None:
    said = describe_spark_error(UNREAD.format(file="a").replace("Unexpected end of input stream", cause))
    assert said.startswith(f"the file a cannot be read ({cause}); {remedy}")


def test_what_the_jdbc_driver_says_of_postgres() -> None:
    said = (
        "An error occurred while calling o9.save.\n: org.apache.spark.SparkException: Job aborted: Task 0 failed: "
        "java.sql.BatchUpdateException: Batch entry 0 <unknown> was aborted: ERROR: invalid input syntax for type "
        'uuid: "a secret"  Call getNextException to see other errors in the batch.\n\tat x'
    )
    assert describe_spark_error(said) == "Postgres says: invalid input syntax for type uuid"


def test_what_spark_says_of_a_value() -> None:
    said = (
        "An error occurred while calling o9.collect.\n: org.apache.spark.SparkNumberFormatException: "
        "[CAST_INVALID_INPUT] The value 'a\n'secret'' of the type \"STRING\" cannot be cast to \"INT\" because it is "
        "malformed. SQLSTATE: 22018\n\tat x"
    )
    assert describe_spark_error(said) == (
        'org.apache.spark.SparkNumberFormatException: [CAST_INVALID_INPUT] The value … of the type "STRING" cannot be '
        'cast to "INT" because it is malformed. SQLSTATE: 22018'
    )


AWAITED = """org.apache.spark.SparkException: Exception thrown in awaitResult:
\tat org.apache.spark.Some.thing(Some.scala:1)
Caused by: org.apache.spark.SparkException: Job aborted
Caused by: {cause}
\tat java.base/java.lang.Thread.run(Thread.java:840)"""


class KeptApart(Exception):
    """As pyspark's own, whose text is the first line alone."""

    def __init__(self, java: str) -> None:
        super().__init__(java.partition("\n")[0])
        self._stackTrace = java


def test_the_cause_of_what_failed_in_another_thread() -> None:
    said = text_of(KeptApart(AWAITED.format(cause="java.io.IOException: No space left on device")))
    assert describe_spark_error(said) == "No space left on device"
    value = "org.apache.spark.SparkDateTimeException: [CAST_INVALID_INPUT] The value 'secret' is bad. SQLSTATE: 22018"
    assert "secret" not in describe_spark_error(text_of(KeptApart(AWAITED.format(cause=value))))


@pytest.mark.parametrize(
    ("cause", "is_one"),
    [
        ("java.lang.OutOfMemoryError: Java heap space", True),
        ("io.netty.util.internal.OutOfDirectMemoryError: failed to allocate 16777216 byte(s)", True),
        ("org.apache.arrow.memory.OutOfMemoryException: Failure allocating buffer.", True),
        ("java.io.IOException: No space left on device", False),
    ],
)
def test_no_memory_of_any_kind(cause: str, is_one: bool) -> None:
    assert is_out_of_memory(text_of(KeptApart(AWAITED.format(cause=cause)))) is is_one
    assert is_out_of_memory(f"An error occurred while calling o1.x.\n: {cause}") is is_one


def test_the_first_line_of_anything_else() -> None:
    assert (
        describe_spark_error("An error occurred while calling o1.x.\n: java.lang.Error: why\n\tat x")
        == "java.lang.Error: why"
    )
    assert describe_spark_error("[SOME] thing") == "[SOME] thing"
    assert describe_spark_error("") == ""
