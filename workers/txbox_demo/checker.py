"""The check compares what is in the tables and in the mail server at the end with the file, in a few statements.

It uses nothing that txbox reports. A trigger records the leases that had run out when the next one was granted: only
these may lead to a second mail (see ``txbox_demo.services``).
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field
from email.parser import BytesHeaderParser
from typing import Any

from sqlalchemy import Connection, Engine

from txbox_demo.purchases import Purchase
from txbox_local import AcceptedMail

TABLES = """
CREATE TABLE purchase (LIKE purchase_order);
CREATE VIEW account_by_file AS SELECT customer_id, count(*) AS purchases, sum(cds) AS cds, sum(cents) AS cents
FROM purchase GROUP BY customer_id;
CREATE TABLE mail
(number int, order_id text, customer_id text, cents bigint, message_id text, fence bigint, unknown_attempts int);
CREATE TABLE lease_run_out (message_id text, fence bigint);
CREATE FUNCTION note_run_out() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
INSERT INTO lease_run_out SELECT old.message_id, old.fence WHERE old.expires_at <= clock_timestamp();
RETURN NULL; END $$;
CREATE TRIGGER note_run_out AFTER UPDATE ON message_lease FOR EACH ROW
WHEN (new.fence <> old.fence AND old.completed_at IS NULL) EXECUTE FUNCTION note_run_out()"""
"""The file's purchases, the mails that the server accepted, and the leases that had run out when the next began."""

ACCOUNTS = {
    "accounts": "(TABLE account_by_file EXCEPT TABLE account) UNION (TABLE account EXCEPT TABLE account_by_file)",
    "billed not once": """
SELECT coalesce(order_id, message_id) FROM purchase FULL JOIN (
  SELECT message_id FROM processed_message WHERE subscriber_id = 'billing' AND dead_letter_id IS NULL
) AS billed ON message_id = order_id GROUP BY 1 HAVING count(order_id) <> 1 OR count(message_id) <> 1""",
    "left in the outbox": "SELECT message_id FROM outbox_message",
    "dead letters": "SELECT message_id FROM dead_letter",
}
"""What is wrong: each statement returns the ids that differ from the file, none if all is well."""

CHAIN = ACCOUNTS | {
    "orders": "(TABLE purchase EXCEPT TABLE purchase_order) UNION (TABLE purchase_order EXCEPT TABLE purchase)",
    "not completed": "SELECT message_id FROM message_lease WHERE completed_at IS NULL",
    "mails missing": "SELECT order_id FROM purchase EXCEPT SELECT order_id FROM mail",
    "mails wrong": """
SELECT order_id, customer_id, cents FROM mail EXCEPT SELECT order_id, customer_id, cents FROM purchase""",
    # A second mail is no error if the lease of the first had run out, and the ledger reported that to the next owner:
    #
    #   worker A   acquire ── mail, 250 ── killed, or its lease is lost
    #   worker B                              the lease runs out ── acquire: unknown attempts ── mail ── complete
    "mails repeated": """
SELECT order_id FROM (
  SELECT *, lag(message_id) OVER copies AS earlier, lag(fence) OVER copies AS earlier_fence
  FROM mail WINDOW copies AS (PARTITION BY order_id ORDER BY fence, number)
) AS copy
WHERE earlier IS NOT NULL AND (
  earlier <> message_id OR unknown_attempts = 0 OR earlier_fence = fence
  OR (earlier, earlier_fence) NOT IN (SELECT message_id, fence FROM lease_run_out)
)""",
}
"""The same for a whole run: also the orders, and that each order was mailed once."""

_MONEY = """
SELECT sum(by_file.cents) AS "by the file", sum(account.cents) AS "in the accounts",
  sum(abs(coalesce(by_file.cents, 0) - coalesce(account.cents, 0))) AS difference
FROM account_by_file AS by_file FULL JOIN account USING (customer_id)"""

_MAILS = """
SELECT sum(mails) AS mails, count(*) FILTER (WHERE mails = 1) AS "mailed once",
  count(*) FILTER (WHERE mails > 1) AS "mailed again"
FROM (SELECT count(*) AS mails FROM mail GROUP BY order_id) AS mailed"""

_REMARKS = {
    "mails": "accepted by the SMTP server",
    "mailed once": "orders of which the customer got one mail",
    "mailed again": "a worker was killed or stalled between mail and completion: nothing can know",
}


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The result of a run."""

    wrong: dict[str, list[str]]  # the ids, by what is wrong with them; all empty if all is well
    figures: dict[str, tuple[int, str]]  # each count, with a remark
    cents: dict[str, int]  # in the file, in the accounts, and the sum of all customers' absolute differences
    kills: dict[str, dict[str, int]] = field(default_factory=dict)  # of processes, by role and moment
    seconds: float = 0.0  # from the first order to the last ack
    kept: str = ""  # schema and queues that were left behind
    spark_stage: "DemoReport | None" = None

    @property
    def exact(self) -> bool:
        """Whether each purchase was billed once, to the cent, and mailed once wherever that can be known."""
        return not any(self.wrong.values()) and (self.spark_stage is None or self.spark_stage.exact)

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain values, without URLs, as one may hold a password."""
        figures = {name: figure for name, (figure, _) in self.figures.items()}
        spark_stage = self.spark_stage and self.spark_stage.as_dict()
        return {"exact": self.exact, **asdict(self), "figures": figures, "spark_stage": spark_stage}


def check(
    engine: Engine, purchases: Iterable[Purchase], mails: Iterable[AcceptedMail], statements: Mapping[str, str]
) -> DemoReport:
    """Compare the tables and the mails with the file, by the statements of ``ACCOUNTS`` or ``CHAIN``."""
    with engine.begin() as connection:
        _copy(connection, "purchase", map(astuple, purchases))
        _copy(connection, "mail", ((number, *_read(mail)) for number, mail in enumerate(mails)))
        wrong = {what: sorted(set(connection.exec_driver_sql(sql).scalars())) for what, sql in statements.items()}
        cents, counts = (connection.exec_driver_sql(sql).mappings().one() for sql in (_MONEY, _MAILS))
    figures = {name: (int(counts[name]), remark) for name, remark in _REMARKS.items()} if counts["mails"] else {}
    return DemoReport(wrong, figures, {name: int(amount or 0) for name, amount in cents.items()})


def _copy(connection: Connection, table: str, rows: Iterable[tuple[object, ...]]) -> None:
    cursor: Any = connection.connection.cursor()
    with cursor, cursor.copy(f"COPY {table} FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)


def _read(mail: AcceptedMail) -> tuple[object, ...]:
    """Read a mail. Its customer is the recipient given to the server, not the one that the mail names."""
    headers = BytesHeaderParser().parsebytes(mail.content)
    customer = " ".join(recipient.removesuffix("@customers.example") for recipient in mail.recipients)
    order, *others = (headers[f"X-{name}"] for name in ("Order", "Cents", "Message", "Fence", "Unknown-Attempts"))
    return (order, customer, *others)
