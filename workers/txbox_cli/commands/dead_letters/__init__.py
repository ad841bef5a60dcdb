"""``txbox dead-letters``: look at parked messages, send them through again, or give them up."""

from txbox_cli.options import Commands

__all__ = ["app"]

app = Commands(help="Look at parked messages, send them through again, or give them up.")
app.later("list", f"{__name__}.letters", "List dead letters, oldest first.", attribute="list_letters")
app.later("show", f"{__name__}.letters", "Show one dead letter, with the beginning of its body.")
app.later("redrive", f"{__name__}.operations", "Send dead letters through again.")
app.later("discard", f"{__name__}.operations", "Give dead letters up, with a note why.")
app.later("resume", f"{__name__}.operations", "Go on with a redrive or a discard.")
app.later("operations", f"{__name__}.operations", "List redrives and discards.", attribute="list_operations")
app.later(
    "import", f"{__name__}.queues", "Take messages over from SQS's own dead-letter queue.", attribute="import_letters"
)
app.later("redrive-queue", f"{__name__}.queues", "Have SQS move its own dead-letter queue back.")
