"""What a dashboard may do and show."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request

from txbox import DeadLetter, InvalidConfiguration

TOKEN_CHARACTERS = 16
"""The least length of a token."""


@dataclass(frozen=True, slots=True)
class Sensitive:
    """A text of a message that a ``redact`` hook may change before it is shown.

    Attributes:
        kind: a body, a header's value, or an error's text.
        message_id: the message's id; empty if an error concerns several messages, or a bulk load.
        subscriber_id: who parked or processed the message; for one in the outbox, its destination.
        header: the header's name; None for a body or an error.
        text: what would be shown, and more of it; of a body, what its first 128 KiB hold. Bytes that are not text are
            hexadecimal digits.
    """

    kind: Literal["body", "header", "error"]
    message_id: str
    subscriber_id: str
    header: str | None
    text: str


Redact = Callable[[Sensitive], str]
"""Returns what is shown in place of a text."""

Identify = Callable[[Request], str | None]
"""Returns who makes a request, for the record; None refuses the request."""

Send = Callable[[DeadLetter], None]
"""Returns a dead letter to the source that it came from."""


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """The settings of one dashboard; see ``txbox_dashboard.dashboard``."""

    schema: str | None
    prefix: str
    allow_actions: bool
    token: str | None
    identify: Identify | None
    show_bodies: bool
    redact: Redact | None
    allowed_hosts: Sequence[str] | None
    send: Send | None

    def __post_init__(self) -> None:
        if self.token is not None and len(self.token) < TOKEN_CHARACTERS:
            raise InvalidConfiguration(
                f"dashboard.token must have at least {TOKEN_CHARACTERS} characters; "
                "the command takes it from TXBOX_DASHBOARD_TOKEN"
            )
        if self.allow_actions and self.token is None and self.identify is None:
            raise InvalidConfiguration(
                "dashboard.allow_actions takes a token, or identify, a function that says who makes a request"
            )

    @property
    def signs_in(self) -> bool:
        """Whether people must give the token."""
        return self.token is not None and self.identify is None
