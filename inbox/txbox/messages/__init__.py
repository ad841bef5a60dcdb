"""Message types: a body is read as, and written from, a pydantic model, a dataclass, or a union of them.

They need pydantic, from ``txbox[typed]``, which is imported when the first one is made.
"""

from txbox.messages.body import Body
from txbox.messages.message_type import MessageType

__all__ = ["Body", "MessageType"]
