"""Arrow's columns as lines of CSV, as COPY reads them.

Only text is in quotes, so that null alone is nothing at all. It is done a column at a time: a line takes a fifth of a
microsecond, where Spark's own expressions take one. What a type looks like as text is decided here for the types that
``columns`` sends as they are; every other one has been made text before.

https://www.postgresql.org/docs/current/sql-copy.html
"""

from txbox_spark.runtime.lazy_imports import compute, pyarrow


def csv_lines(batch: "pyarrow.RecordBatch") -> memoryview:
    """Return the rows of a batch as lines of CSV, in UTF-8."""
    return _text(csv_texts(batch))


def csv_texts(batch: "pyarrow.RecordBatch") -> "pyarrow.StringArray":
    """Return each row of a batch as a line of CSV."""
    pieces: list[pyarrow.Array | str] = []
    for column in batch.columns:
        pieces += [",", _field(column)]
    return compute.binary_join_element_wise(*pieces[1:], "\n", "")


def _field(column: "pyarrow.Array") -> "pyarrow.StringArray":
    """Return a column's values as fields of CSV; null is the empty one."""
    if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
        words = column.cast(pyarrow.string())
        if compute.any(compute.match_substring(words, '"')).as_py():
            words = compute.replace_substring(words, '"', '""')
        words = compute.binary_join_element_wise('"', words, '"', "")
    elif pyarrow.types.is_timestamp(column.type) and column.type.tz is not None:
        # Moments are kept in UTC, whatever the zone is; to look it up for each of them takes fifty times as long.
        local = column.cast(pyarrow.int64()).cast(pyarrow.timestamp(column.type.unit))
        words = compute.binary_join_element_wise(local.cast(pyarrow.string()), "Z", "")
    else:
        words = column.cast(pyarrow.string())
    return words.fill_null("") if words.null_count else words


def _text(lines: "pyarrow.StringArray") -> memoryview:
    """Return the texts of an array, none of them null, as Arrow keeps them: one after the other, nothing between.

    https://arrow.apache.org/docs/format/Columnar.html#variable-size-binary-layout
    """
    _, offsets, text = lines.buffers()
    ends = memoryview(offsets).cast("i")
    return memoryview(text)[ends[lines.offset] : ends[lines.offset + len(lines)]]
