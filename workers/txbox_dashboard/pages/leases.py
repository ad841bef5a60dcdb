"""The page of leases."""

from txbox.postgres.sql_files import SqlFile
from txbox_dashboard.view import Page, Request

LOOKED_AT_BLOCKS = 1000
"""Blocks read at the end of the table: some 8 MB. A new lease goes where there is room, mostly there."""

SHOWN = 100


class LeasePageStatements(SqlFile, file="leases.sql"):
    blocks: str
    counts: str
    under_way: str


def leases(request: Request) -> Page:
    """Show which messages are processed under leases, and which leases were left behind."""
    reader = request.reader
    sql = LeasePageStatements.load(reader.schema, reader.prefix)
    sizes = reader.rows("the leases", sql.blocks)
    blocks, rows = (sizes[0]["blocks"], sizes[0]["rows"]) if sizes else (0, 0)
    first = {"first": f"({max(blocks - LOOKED_AT_BLOCKS, 0)},0)"}
    counts = reader.rows("the leases of each subscriber", sql.counts, first) or ()
    found = reader.rows("what is under way", sql.under_way, {**first, "limit": SHOWN + 1}) or ()
    whole = blocks <= LOOKED_AT_BLOCKS
    return Page(
        "leases.html",
        {
            "counts": counts,
            "whole": whole,
            "rows": sum(sum(one[name] for name in _STATES) for one in counts) if whole else rows,
            "found": found[:SHOWN],
            "more": len(found) > SHOWN,
            "in_flight": sum(one["in_flight"] for one in counts),
            "run_out": sum(one["run_out"] for one in counts),
            "failed": sum(one["failed"] for one in counts),
        },
    )


_STATES = ("completed", "in_flight", "run_out", "failed")
