"""Compares the states of a trial: which rows differ, and how a report says so."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
State = Mapping[str, list[Row]]
"""The rows of each table, by its name."""

Differences = dict[str, tuple[list[str], list[str]]]
"""For each table that differs, the rows that are missing and those that are too many."""


def changing_columns(one: State, other: State) -> dict[str, frozenset[str]]:
    """Return the columns whose values differ between two states that should be the same, such as times and serials."""
    return {
        table: frozenset(
            column
            for column in {name for row in (*rows, *other.get(table, ())) for name in row}
            if Counter(_text(row.get(column)) for row in rows)
            != Counter(_text(row.get(column)) for row in other.get(table, ()))
        )
        for table, rows in one.items()
    }


def differences(expected: State, found: State, ignored: Mapping[str, frozenset[str]]) -> Differences:
    """Return the rows in which two states differ, apart from the ignored columns."""
    result: Differences = {}
    for table in sorted(expected.keys() | found.keys()):
        leave_out = ignored.get(table, frozenset())
        wanted = _bag(expected.get(table, ()), leave_out)
        has = _bag(found.get(table, ()), leave_out)
        if wanted != has:
            result[table] = (sorted((wanted - has).elements()), sorted((has - wanted).elements()))
    return result


def _bag(rows: Iterable[Row], leave_out: frozenset[str]) -> Counter[str]:
    return Counter(_text({name: value for name, value in row.items() if name not in leave_out}) for row in rows)


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def unlike(before: State, expected: State, found: State, ignored: Mapping[str, frozenset[str]]) -> list[str]:
    """Return in words how a state differs from the expected one, both reached from the rows of ``before``.

    The number of changed rows is compared, too: it reveals effects on columns that are left out.
    """
    found_out = differences(expected, found, ignored)
    lines = lines_of(found_out)
    for table in sorted((expected.keys() | found.keys()) - found_out.keys()):
        has, should = (_changed(before.get(table, ()), state.get(table, ())) for state in (found, expected))
        if has != should:
            lines.append(f"{table}: {plural(has, 'row')} changed in place of {should}")
    return lines


def values_of(one: State, other: State, ignored: Mapping[str, frozenset[str]]) -> list[str]:
    """Return in words the values of the columns that differ between two states."""
    lines = []
    for table, columns in changing_columns(one, other).items():
        for column in sorted(columns - ignored.get(table, frozenset())):
            has, then = (Counter(_text(row.get(column)) for row in state.get(table, ())) for state in (one, other))
            values = [described(sorted(each.elements())) or "none" for each in (has - then, then - has)]
            lines.append(f"{table}.{column} is {' and then '.join(values)}")
    return lines


def _changed(before: Iterable[Row], after: Iterable[Row]) -> int:
    """Return how many rows were inserted, updated or deleted, each counted once."""
    had, has = _bag(before, frozenset()), _bag(after, frozenset())
    return max((had - has).total(), (has - had).total())


def lines_of(found: Differences) -> list[str]:
    """Return differences in words, one line for each table."""
    lines = []
    for table, (missing, surplus) in found.items():
        parts = [f"{plural(len(missing), 'row')} missing: {described(missing)}"] if missing else []
        parts += [f"{plural(len(surplus), 'row')} too many: {described(surplus)}"] if surplus else []
        lines.append(f"{table}: {'; '.join(parts)}")
    return lines


def plural(number: int, what: str) -> str:
    """Return a number with its noun: 1 row, 2 rows."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def described(values: Sequence[str], most: int = 3) -> str:
    """Return a few values for a line of a report, and how many more there are."""
    rest = f" and {len(values) - most} more" if len(values) > most else ""
    return "; ".join(values[:most]) + rest
