"""``txbox loads``: look at the runs of bulk loads, finish them, forget them."""

from txbox_cli.commands.loads import details, listing, removal, resumption
from txbox_cli.options import Commands

__all__ = ["app"]

app = Commands(help="Look at the runs of bulk loads, finish them, forget them.")
app.command("list", short_help="List runs, the last begun first.")(listing.list_loads)
app.command("show", short_help="Show one run whole, and how to finish it.")(details.show)
app.command("resume", short_help="Finish a run that was stopped or has failed.")(resumption.resume)
app.command("forget", short_help="Delete runs from the ledger.")(removal.forget)
