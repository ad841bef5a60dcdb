"""Which SQL ends the transaction it is run in."""

import pytest

from txbox.postgres.guards.transaction_guard import ends_transaction


@pytest.mark.parametrize(
    "sql",
    [
        "COMMIT",
        "  commit and chain",
        "END",
        "ABORT",
        "ROLLBACK",
        "ROLLBACK WORK",
        "PREPARE TRANSACTION 'x'",
        "CLOSE ALL",
        "SELECT 1; close  txbox_guard",
        "/* x */ COMMIT",
        "/* a /* nested */ comment */ COMMIT",
        "-- x\nCOMMIT",
        "; COMMIT",
        "SELECT 1; COMMIT",
        "SELECT 1; ROLLBACK; BEGIN",
        "SELECT ';' ; COMMIT",
        'SELECT 1 AS "a;b"; COMMIT',
        "DO $$ BEGIN PERFORM 1; END $$; COMMIT",
        r"SELECT E'\''; COMMIT; SELECT '1'",
        "SELECT '\\', e'a' -- goes on\n'\\''; COMMIT; SELECT '1'",
        r"SELECT '\''; COMMIT; SELECT '1'",  # with standard_conforming_strings=off
        r"SELECT '\'; COMMIT; SELECT '1'",  # without
        r"SELECT U&'\'; COMMIT; SELECT '1'",
        r"SELECT NAMEE'\'; COMMIT; SELECT '1'",
        "SELECT 1 AS a$$; COMMIT; SELECT 1 AS b$$",
        "SELECT $a$ $b$ $a$; COMMIT; SELECT $b$ $b$",
        "SELECT 1 -- x\r; COMMIT",
        "ROLLBACK -- \0\n TO a",
        "CLOSE/**/all",
        'SELECT 1; CLOSE"txbox_guard"',
        r'CLOSE U&"txbox\005fguard"',
    ],
)
def test_what_ends_it_is_found_wherever_it_hides(sql: str) -> None:
    assert ends_transaction(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1",
        "ROLLBACK TO SAVEPOINT a",
        "ROLLBACK TRANSACTION TO a",
        "RELEASE SAVEPOINT a",
        "UPDATE t SET x = CASE WHEN y THEN 1 ELSE 2 END",
        "SELECT 'a; COMMIT; b'",
        "SELECT 'it''s'; SELECT '; COMMIT'",
        'SELECT 1 AS "; COMMIT"',
        "SELECT 1 -- ; COMMIT",
        "SELECT /* ; COMMIT; */ 1",
        "DO $$ BEGIN PERFORM 1; END $$",
        "CREATE FUNCTION f() RETURNS int LANGUAGE plpgsql AS $body$ BEGIN RETURN 1; END; $body$",
        "INSERT INTO commits (id) VALUES (1)",
        "PREPARE plan AS SELECT 1",
        "COMMENT ON TABLE t IS 'COMMIT'",
        r"SELECT E'\'; COMMIT; \\'; SELECT 1",
        "SELECT E'a'\n'\\'; COMMIT; '",
        "SELECT $a$; COMMIT; $b$; COMMIT; $a$; SELECT 1",
        "SELECT $$; COMMIT; $a$; COMMIT",
        "SELECT /* /* ; COMMIT */ ; COMMIT */ 1; SELECT 2",
        "SELECT U&'; COMMIT'; SELECT 1",
        'SELECT 1 AS U&"; COMMIT"; SELECT 1',
        'SELECT 1 AS "a""; COMMIT"; SELECT 1',
        'CLOSE "mine"',
        "ROLLBACK /* ; */ TO a; SELECT 1",
    ],
)
def test_what_does_not_end_it_is_let_through(sql: str) -> None:
    assert not ends_transaction(sql)
