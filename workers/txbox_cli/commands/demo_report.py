"""How ``txbox demo`` shows what came of it."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from txbox_demo.accounting import Comparison, Notices
    from txbox_demo.last_act import LastAct
    from txbox_demo.report import Report

__all__ = ["print_report"]


def print_report(console: Console, report: "Report") -> None:
    """Print the verdict on a run, its figures, what contradicts them, and the verdict again, in few words."""
    accounts = "every customer is right to the cent" if report.comparison.exact else "THE ACCOUNTS ARE WRONG"
    notices = _notices(report.notices)
    ran = f"{report.seconds:.0f} s, {report.processes_started} processes started"
    console.print(f"{accounts}, {notices}; {ran}\n", style="bold")
    table = _table()
    for name, value, remark in _rows(report):
        table.add_row(name, f"{value:,}", remark)
    _add_money(table, report.comparison)
    console.print(table)
    for subscriber, deliveries in report.deliveries.items():
        balance = (
            f"{subscriber}: deliveries {deliveries.received:,} = {deliveries.processed:,} processed + "
            f"{deliveries.duplicates:,} duplicates + {deliveries.failed:,} failed + {deliveries.in_flight:,} in flight"
        )
        console.print(balance if deliveries.adds_up else f"DOES NOT ADD UP: {balance}")
    if report.notices.unsure:
        console.print(_mails(report.notices))
    for contradiction in report.contradictions:
        console.print(f"CONTRADICTION: {contradiction}")
    if report.last_act is not None:
        _print_last_act(console, report.last_act)
    if report.plan.keep:
        console.print(f"kept: schema {report.schema}, queues {' '.join(report.queue_urls)}")
    _print_end(console, report)


def _print_end(console: Console, report: "Report") -> None:
    """Print what remains on the screen: the verdict in few words, and what comes next."""
    if not report.exact:
        console.print("\nNOT EXACT: what is wrong is said above, in capitals or as a count", style="bold")
        return
    killed = f"processes killed: {report.kills_total}"
    twice = f"; mails sent twice: {report.notices.unsure_twice:,}, as said above" if report.notices.unsure_twice else ""
    console.print(f"\nEXACT: nothing was lost, and nothing was applied twice; {killed}{twice}", style="bold")
    console.print(
        "next: `txbox dev` starts servers for a service of yours; see docs/getting-started.md and docs/outbox.md"
    )


def _rows(report: "Report") -> list[tuple[str, int, str]]:
    purchases, sends, notices = report.plan.purchases, report.sends, report.notices
    rows = [
        ("orders", report.shop.placed, "committed by the shop, each with its message"),
        ("rolled back", report.shop.rolled_back, "orders with their messages: declined cards"),
        ("messages", sends.messages, "published by the shop and by billing, and sent by the relays"),
        ("sent again", sends.again, "by the relays: killed after they had sent, or the answer was lost"),
    ]
    for subscriber, deliveries in report.deliveries.items():
        share = f"{deliveries.duplicates / purchases:.0%} of the purchases"
        rows += [
            (f"{subscriber}: delivered", deliveries.received, "to workers"),
            ("processed", deliveries.processed, _PROCESSED.get(subscriber, "messages in the inbox")),
            ("duplicates rejected", deliveries.duplicates, f"each would have been applied a second time; {share}"),
            ("failed", deliveries.failed, _FAILED.get(subscriber, "their handlers raised")),
            (
                "in flight",
                deliveries.in_flight,
                "without effect: their worker was killed, or handed them back; they came again",
            ),
        ]
    for role, moments in report.kills.items():
        words = {**_WHERE, **_WHERE_OF.get(role, {})}
        where = ", ".join(f"{number} {words[moment]}" for moment, number in moments.items())
        rows.append((f"kills: {role}", sum(moments.values()), where))
    wrong = f"{len(notices.missing)} missing, {len(notices.repeated)} repeated, {len(notices.wrong)} wrong"
    rows += [
        ("backlog", report.standing.backlog, "messages left in the outbox and in the queues"),
        ("dead", report.dead, "dead letters"),
        ("mails", notices.mails, f"accepted by the SMTP server; {wrong}"),
        ("mails refused", notices.refused, "by the SMTP server, which is known: they were sent again"),
        ("mailed once", notices.once, "purchases of which the customer was told once"),
        ("unsure", notices.unsure, "taken over from a worker that was killed, before or after its mail: nobody knows"),
        ("customers", report.comparison.customers, f"{len(report.comparison.wrong)} wrong"),
    ]
    return rows


def _notices(notices: "Notices") -> str:
    """Say what customers were told, once or twice."""
    if not notices.exact:
        return "THE NOTIFICATIONS ARE WRONG"
    if not notices.unsure_twice:
        return "and was notified of every purchase once"
    return f"and was notified of every purchase: of {notices.once:,} once, of {notices.unsure_twice:,} twice"


def _mails(notices: "Notices") -> str:
    """Say how many mails came twice, and of how many nobody could know whether they would."""
    twice, once = f"mailed twice: {notices.unsure_twice:,}", f"mailed once: {notices.unsure_once:,}"
    if notices.unsure_twice:
        twice += ", each worker killed or stalled between the mail and its completion: nobody can know"
    return f"{twice}; {once}, which looked the same to the next worker"


_PROCESSED = {"notification": "messages completed in the ledger"}
_FAILED = {"notification": "the SMTP server refused the mail"}
"""What differs where there is a ledger in place of an inbox."""

_WHERE = {
    "anywhere": "anywhere",
    "inserted": "between insert and commit",
    "claimed": "before the send",
    "sent": "between send and settle",
    "received": "before the transaction",
    "handling": "between insert and commit",
    "committed": "between commit and ack",
}
_WHERE_OF = {
    "notification": {
        "received": "before the lease",
        "sending": "between lease and mail",
        "sent": "between mail and completion",
        "committed": "between completion and ack",
    }
}
"""Moments to die, in words."""


def _print_last_act(console: Console, act: "LastAct") -> None:
    load = act.load
    console.print("\nlast act: Spark loads the whole file while workers process a part of it", style="bold")
    table = _table()
    begun = (
        f"writer {load['writer']}, {load['chunks']} chunks; {act.left_for_workers:,} messages were published after "
        "the first"
    )
    rows = [
        ("read by Spark", load["read"], begun),
        ("applied by Spark", load["applied"], "events that were first"),
        ("found processed", load["already_processed"], "events that workers had been first with"),
        ("applied by workers", act.processed_by_workers, "messages that were first"),
        ("rejected by workers", act.rejected_by_workers, "among them those that Spark had been first with"),
        ("in the inbox", act.recorded, "both roads together"),
    ]
    for name, value, remark in rows:
        table.add_row(name, f"{value:,}", remark)
    _add_money(table, act.comparison)
    console.print(table)
    balance = f"{load['read']:,} purchases = {load['applied']:,} by Spark + {act.processed_by_workers:,} by workers"
    console.print(balance if act.adds_up else f"DOES NOT ADD UP: {balance}")
    verdict = "every customer is right to the cent" if act.comparison.exact else "THE ACCOUNTS ARE WRONG"
    console.print(f"{verdict}; {act.seconds:.0f} s", style="bold")


def _table() -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_column(style="dim")
    return table


def _add_money(table: Table, comparison: "Comparison") -> None:
    table.add_row("by the file", _dollars(comparison.expected_cents), "added up without a database")
    table.add_row("in the accounts", _dollars(comparison.found_cents), "added up by billing")
    table.add_row(
        "difference", _dollars(comparison.difference_cents), "sum of the absolute differences of all customers"
    )


def _dollars(cents: int) -> str:
    return f"${cents // 100:,}.{cents % 100:02}"
