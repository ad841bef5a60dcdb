"""``txbox schema``: the JSON Schema of a message type, for its producers and for tests of compatibility."""

import inspect
from typing import Annotated, Any

import typer

from txbox import InvalidConfiguration
from txbox.messages import MessageType
from txbox_cli import importer
from txbox_cli.errors import UsageError
from txbox_cli.output import print_json
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.worker import Worker


def schema(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME", help="A worker, a function of Lambda, or a message type.", show_default=False
        ),
    ],
    *,
    published: Annotated[
        bool, typer.Option("--published", help="The schema of what is published, and not of what is read.")
    ] = False,
) -> None:
    """Print the JSON Schema of a message type.

    Of a worker, or of a function that returns one, and of a function of Lambda, it is the type that the handler's
    messages are read as. A message type is a pydantic model, a dataclass, or a union of these: `txbox schema
    shop:Purchase --published`.
    """
    found = importer.load(target, lambda value: not inspect.isfunction(value), such_as="billing:worker")
    print_json(_message_type(found).json_schema(published=published))


def _message_type(found: importer.Imported) -> MessageType:
    value = found.value
    reads: Any = (
        value if isinstance(value, Worker | AsyncWorker) else getattr(value, "__self__", None)
    )  # a function of Lambda is a bound method
    if hasattr(reads, "message_type"):
        if isinstance(reads.message_type, MessageType):
            return reads.message_type
        raise UsageError(f"{found.what}, whose handler takes messages as they are; annotate its message's parameter")
    try:
        return MessageType(value)
    except InvalidConfiguration as error:
        raise UsageError(f"{found.what}, neither a worker nor a message type: {error}") from error
