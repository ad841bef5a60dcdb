"""Message types: what a message's body is read as, and written from: pydantic models, dataclasses, unions of them.

They need pydantic, from ``txbox[typed]``, which is imported when the first one is made.
"""

from txbox.messages.body import Body
from txbox.messages.message_type import MessageType

__all__ = ["Body", "MessageType"]
