"""Cuts message ids into chunks: ranges whose bounds are quantiles of a sample.

A chunk is a contiguous range of the inbox's primary key. So the search for processed ids reads only that range, and
sorted inserts find pages that are still in memory. All duplicates of an id are in one chunk, so chunks merge in
parallel without waiting for each other.

The sample has the ids with the smallest hashes. It is uniform over the distinct ids, and the same each time (bottom-k
sampling: E. Cohen and H. Kaplan, "Summarizing Data using Bottom-k Sketches", PODC 2007).
"""

from collections.abc import Collection, Sequence

from txbox_spark.reading.columns import MESSAGE_ID
from txbox_spark.reading.row_order import ANY, ROW_ORDER, is_latest
from txbox_spark.runtime.lazy_imports import Column, DataFrame, sql


def chunk_bounds(sample: Sequence[str], chunks: int) -> tuple[str, ...]:
    """Return the bounds between chunks: bound k is the first id of chunk k + 1.

    ``sample`` has distinct ids, sorted. If it has fewer ids than ``chunks``, there are fewer chunks.
    """
    wanted = min(chunks, len(sample))
    return tuple(sample[len(sample) * number // wanted] for number in range(1, wanted))


def chunk_range(bounds: Sequence[str], chunk: int, last: int | None = None) -> tuple[str, str | None]:
    """Return a chunk's first possible id, and the first one beyond it, or beyond ``last``; None if it is unbounded."""
    return ("", *bounds)[chunk], (*bounds, None)[chunk if last is None else last]


def chunk_number(bounds: Sequence[str], leaves: Sequence[int] | None = None) -> Column:
    """Return Spark's expression for an id's chunk, by binary search; a rejected row belongs to the last chunk.

    Spark compares strings byte by byte, as Postgres does with COLLATE "C". ``leaves`` has the values to return instead
    of the chunks' numbers.
    """
    numbers = range(len(bounds) + 1) if leaves is None else leaves
    if not bounds:
        return sql.lit(numbers[0])
    middle = len(bounds) // 2
    return sql.when(
        sql.col(MESSAGE_ID) < sql.lit(bounds[middle]), chunk_number(bounds[:middle], numbers[: middle + 1])
    ).otherwise(chunk_number(bounds[middle + 1 :], numbers[middle + 1 :]))


def chunk_groups(chunks: int, grouped: Collection[int], most: int) -> tuple[int, ...]:
    """Return, for each chunk, the first chunk of its group: up to ``most`` consecutive chunks of ``grouped``."""
    firsts: list[int] = []
    for chunk in range(chunks):
        with_last = chunk in grouped and chunk - 1 in grouped and chunk - firsts[-1] < most
        firsts.append(firsts[-1] if with_last else chunk)
    return tuple(firsts)


def partition_by_chunk(
    events: DataFrame,
    bounds: tuple[str, ...],
    left_out: Collection[int],
    tasks: int,
    groups: Sequence[int] | None = None,
    keep: str = ANY,
) -> DataFrame:
    """Partition events so that each task gets whole consecutive chunks, sorted by id, rejected rows last.

    There are as many tasks as chunks, but at most ``tasks``; chunks that are ``left_out`` are in none. With ``groups``
    from ``chunk_groups``, a task gets whole groups. There is one partition per task instead of one per chunk, because
    sorting many small partitions takes Spark half as much time again.
    """
    numbers = range(len(bounds) + 1) if groups is None else sorted(set(groups))
    if left_out:
        events = events.where(~chunk_number(bounds).isin(list(left_out)))
    partitions = min(tasks, len(numbers))
    keys = partition_keys(partitions)
    begins = [numbers[len(numbers) * number // partitions] for number in range(1, partitions)]
    partitioned = events.repartition(partitions, chunk_number([bounds[begin - 1] for begin in begins], keys))
    order = [sql.col(MESSAGE_ID).asc_nulls_last()]
    if keep != ANY:  # the merge takes the first of several rows with the same id
        column = sql.col(ROW_ORDER)
        order.append(column.desc_nulls_last() if is_latest(keep) else column.asc_nulls_last())
    return partitioned.sortWithinPartitions(*order)


def partition_keys(partitions: int) -> tuple[int, ...]:
    """Return, for each partition, a number that ``repartition(partitions, number)`` sends there.

    Spark places a row by the Murmur3 hash of its key. With the chunks' own numbers as keys, some partitions would get
    several keys, and others none.
    """
    keys: dict[int, int] = {}
    number = 0
    while len(keys) < partitions:
        keys.setdefault(_murmur3(number) % partitions, number)
        number += 1
    return tuple(keys[partition] for partition in range(partitions))


def _murmur3(number: int) -> int:
    """Return Spark's ``hash`` of an integer: Murmur3 (A. Appleby), 32 bits, signed, seed 42."""
    bits = 0xFFFFFFFF
    mixed = number * 0xCC9E2D51 & bits
    mixed = (mixed << 15 | mixed >> 17) * 0x1B873593 & bits
    hashed = 42 ^ mixed
    hashed = ((hashed << 13 | hashed >> 19) & bits) * 5 + 0xE6546B64 & bits
    hashed ^= 4
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & bits
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & bits
    hashed ^= hashed >> 16
    return hashed - (1 << 32) if hashed >> 31 else hashed
