"""What every road has to read alike: bodies with the rows they make, and bodies that are malformed."""

FIELDS = (
    "customer_id text at /customer/id not null, cents bigint, small smallint, price numeric(6,2), "
    "ratio double precision, paid boolean, day date, at timestamptz, local timestamp without time zone, ref uuid, "
    "details jsonb, currency text default 'EUR', free numeric"
)


def with_customer(rest: str) -> str:
    return f'{{"customer": {{"id": "c-1"}}, {rest}}}'


GOOD: list[tuple[str, dict[str, str | None]]] = [
    ('{"customer": {"id": "c-1"}}', {"customer_id": "c-1"}),
    (' \t{"customer": {"id": "c-1"}} \t', {"customer_id": "c-1"}),
    ('{"customer": {"id": "c-1"}, "cents": null, "currency": null}', {"customer_id": "c-1"}),
    ('{"customer": {"id": 17}}', {"customer_id": "17"}),
    ('{"customer": {"id": 1.50}}', {"customer_id": "1.50"}),
    ('{"customer": {"id": true}}', {"customer_id": "true"}),
    ('{"customer": {"id": {"a": [1,  2.0]}}}', {"customer_id": '{"a": [1,  2.0]}'}),
    (
        '{"customer": {"id": "tab\\t, quote\\", backslash \\\\, é, \\u00e9, \\ud83d\\ude00"}}',
        {"customer_id": 'tab\t, quote", backslash \\, é, é, 😀'},
    ),
    ('{"customer": {"id": ""}, "currency": "USD"}', {"customer_id": "", "currency": "USD"}),
    ('{"customer": {"id": "first"}, "customer": {"id": "last"}}', {"customer_id": "last"}),
    *(
        (with_customer(body), {"customer_id": "c-1", **row})
        for body, row in [
            ('"cents": 9223372036854775807, "small": -32768', {"cents": "9223372036854775807", "small": "-32768"}),
            ('"cents": "12"', {"cents": "12"}),
            ('"price": 9999.994, "ratio": 1e-300', {"price": "9999.994", "ratio": "1e-300"}),
            ('"price": "-0.005", "ratio": 0', {"price": "-0.005", "ratio": "0"}),
            ('"free": 123456789012345678901234567890.5e3', {"free": "123456789012345678901234567890.5e3"}),
            ('"paid": true', {"paid": "true"}),
            ('"paid": "false"', {"paid": "false"}),
            ('"day": "2024-02-29"', {"day": "2024-02-29"}),
            ('"at": "2026-01-02T03:04:05.678Z"', {"at": "2026-01-02T03:04:05.678Z"}),
            ('"at": "2026-01-02 03:04:05+05:30"', {"at": "2026-01-02 03:04:05+05:30"}),
            ('"local": "2026-01-02T03:04:05"', {"local": "2026-01-02T03:04:05"}),
            ('"ref": "123E4567-e89b-12d3-a456-426614174000"', {"ref": "123E4567-e89b-12d3-a456-426614174000"}),
            ('"details": {"a" : [1.10, "z"]}', {"details": '{"a" : [1.10, "z"]}'}),
            ('"details": "{\\"a\\": 1}"', {"details": '{"a": 1}'}),
            ('"details": [true, null]', {"details": "[true, null]"}),
            ('"unknown": {"a": 1}, "cents": 1', {"cents": "1"}),
        ]
    ),
]
"""Bodies, and the values that differ from null and from the default."""

HALF_A_PAIR = '{"customer": {"id": "secret \\ud800"}}'

MORE_THAN_ONE: list[str] = [
    '{"customer": {"id": "secret"}} secret',
    '{"customer": {"id": "secret"}}{}',
    '{"customer": {"id": "secret"}},',
    '{"customer": {"id": "secret"}}, {"customer": {"id": "secret"}}',
]
"""Bodies of more than one JSON value: a worker parks them, and a file that has such a line is not loaded at all."""

MALFORMED: list[str] = [
    *MORE_THAN_ONE,
    "",
    "secret",
    "null",
    "17",
    '"secret"',
    '{"customer": {"id": "secret"}',
    "{'customer': {'id': 'secret'}}",
    '{"customer": {"id": NaN}}',
    '{"customer": {"id": 007}}',
    "{}",
    '{"customer": {}}',
    '{"customer": {"id": null}}',
    '{"customer": null}',
    '{"customer": "secret"}',
    '{"customer": {"id": "secret\\u0000"}}',
    HALF_A_PAIR,
    '[{"customer": {"id": "secret"}}]',
    *(
        with_customer(rest)
        for rest in [
            '"cents": 9223372036854775808',
            '"cents": 1.0',
            '"cents": 1e3',
            '"cents": true',
            '"cents": "secret"',
            '"cents": " 1"',
            '"cents": ""',
            '"cents": {"secret": 1}',
            '"small": 32768',
            '"price": 9999.995',
            '"price": "12,5"',
            '"price": "NaN"',
            '"ratio": 1e400',
            '"ratio": 1e-400',
            '"ratio": "Infinity"',
            '"paid": 1',
            '"paid": "yes"',
            '"day": "2023-02-29"',
            '"day": "29.02.2024"',
            '"day": "today"',
            '"day": 20240229',
            '"at": "2026-01-02T03:04:05"',
            '"at": "2026-01-02"',
            '"at": "2026-01-02T24:00:00Z"',
            '"at": "2026-13-02T03:04:05Z"',
            '"at": 1767323045',
            '"local": "2026-01-02T03:04:05Z"',
            '"ref": "secret"',
            '"ref": "{123e4567-e89b-12d3-a456-426614174000}"',
            '"details": "secret"',
            '"details": "{\\"a\\": 1, \\"a\\": 2}"',
            '"details": {"a": "\\u0000"}',
            '"details": "[NaN]"',
            '"details": "{} secret"',
            '"details": "{}, {}"',
        ]
    ),
]
"""Bodies that no road applies."""
