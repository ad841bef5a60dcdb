"""``txbox dead-letters``: look at parked messages, send them through again, or give them up."""

from txbox_cli.commands.dead_letters import letters, operations, queues
from txbox_cli.options import Commands

__all__ = ["app"]

app = Commands(help="Look at parked messages, send them through again, or give them up.")
app.command("list")(letters.list_letters)
app.command("show")(letters.show)
app.command("redrive", short_help="Send dead letters through again.")(operations.redrive)
app.command("discard", short_help="Give dead letters up, with a note why.")(operations.discard)
app.command("resume", short_help="Go on with a redrive or a discard.")(operations.resume)
app.command("operations", short_help="List redrives and discards.")(operations.list_operations)
app.command("import", short_help="Take messages over from SQS's own dead-letter queue.")(queues.import_letters)
app.command("redrive-queue", short_help="Have SQS move its own dead-letter queue back.")(queues.redrive_queue)
