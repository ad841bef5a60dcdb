"""What functions on Lambda are given to run in tests, and what they answer when all went well."""

from collections.abc import Callable

from sqlalchemy.orm import Session

from support.workers.business import apply
from txbox import Message

NOTHING = {"batchItemFailures": []}


def failing_for(*ids: str, error: type[BaseException] = ValueError) -> Callable[[Session, Message], None]:
    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id in ids:
            raise error(f"no {message.id}")

    return handle
