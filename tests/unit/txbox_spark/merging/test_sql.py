"""What stands in the statements of a bulk load, as far as it can be seen without Postgres."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from txbox.postgres.sql import quote
from txbox_spark.merging.effect_runner import in_one_statement


@pytest.mark.parametrize(
    ("name", "quoted"),
    [
        ("plain", "plain"),
        ("Upper", '"Upper"'),
        ("with blank", '"with blank"'),
        ('quo"te', '"quo""te"'),
        ("per%cent", '"per%%cent"'),
        ("select", '"select"'),
        ("a.b", '"a.b"'),
        ("1st", '"1st"'),
    ],
)
def test_names(name: str, quoted: str) -> None:
    assert quote(name).strip('"') == quoted.strip('"')
    assert quote(name) in (quoted, f'"{quoted}"')


@pytest.mark.parametrize("tag", ["$txbox$", "$txbox_do$", "$txboxx$", "$txbox", "$txboxx_do$", "$$", "$", "$txbo"])
def test_a_script_cannot_end_its_own_quotes(tag: str) -> None:
    script = f"SELECT 1 {tag}"
    wrapped = in_one_statement(script)
    do, outer, rest = wrapped.partition("$ BEGIN EXECUTE ")
    outer = do.removeprefix("DO ") + "$"
    inner = rest[: rest.index("$", 1) + 1]
    assert outer != inner
    assert rest == f"{inner}{script}{inner}; END {outer}"
    assert inner not in script
    assert outer not in script


@given(some.text(some.sampled_from("$txbo_dxo ;'")))
def test_no_script_can(script: str) -> None:
    test_a_script_cannot_end_its_own_quotes(script)
