"""Text that Postgres can hold."""

import socket

MAX_HOST_CHARACTERS = 255
"""The longest name that POSIX allows."""


def storable(text: str) -> str:
    """Return text without what Postgres's text and jsonb cannot hold."""
    return text.replace("\0", "�").encode("utf-8", "replace").decode()


def host_name() -> str:
    """Return this machine's name; it may have any bytes, and no report fails for that."""
    return storable(socket.gethostname())[:MAX_HOST_CHARACTERS]
