"""The pace of a merge, from what was merged when."""

import pytest

from txbox_spark.loading.progress_reporter import FIRST_SECONDS, PACE_SECONDS, ProgressMark, merge_pace
from txbox_spark.report import MergePace

BEGUN = 1_000.0


def at(seconds: float, chunks: int, rows: int) -> ProgressMark:
    return ProgressMark(BEGUN + seconds, chunks, rows)


def pace(*seen: ProgressMark, now: float, total: int = 100_000) -> MergePace | None:
    return merge_pace(seen, BEGUN + now, total)


def test_what_is_not_known_yet() -> None:
    assert pace(at(0, 0, 0), now=30) is None, "nothing is merged"
    assert pace(at(0, 5, 9_000), now=30) is None, "nothing by this attempt"
    assert pace(at(0, 0, 0), at(1, 1, 100), now=FIRST_SECONDS - 0.1) is None
    assert pace(at(0, 0, 0), at(1, 1, 0), now=30) is None, "a chunk without rows"


def test_in_the_beginning_it_is_that_since_the_begin() -> None:
    assert pace(at(0, 0, 0), at(5, 4, 8_000), at(10, 10, 20_000), now=10) == MergePace(2_000, 60, 40)


def test_what_earlier_attempts_have_merged_is_done_and_says_nothing_of_the_pace() -> None:
    assert pace(at(0, 40, 80_000), at(10, 45, 90_000), now=10) == MergePace(1_000, 30, 10)


def test_later_it_is_that_of_the_last_minute() -> None:
    slow = [at(second, second, second * 10) for second in range(600)]
    fast = [at(600 + second, 600 + second, 6_000 + second * 100) for second in range(int(PACE_SECONDS) + 1)]
    found = pace(*slow, *fast, now=600 + PACE_SECONDS)
    assert found == MergePace(100, 60, 880)


def test_chunks_that_take_minutes_have_a_pace_and_one_that_stands_still_loses_it() -> None:
    seen = at(0, 0, 0), at(300, 1, 30_000), at(600, 2, 60_000)
    assert pace(*seen, now=600) == MergePace(100, 0.2, 400)
    assert pace(*seen, now=900) == MergePace(50, 0.1, 800)


@pytest.mark.parametrize("total", [0, 20_000, 15_000])
def test_nothing_is_left_where_more_rows_were_read_than_there_are(total: int) -> None:
    """Writer jdbc may stage a row twice."""
    found = pace(at(0, 0, 0), at(10, 1, 20_000), now=10, total=total)
    assert found is not None
    assert found.seconds_left == 0
