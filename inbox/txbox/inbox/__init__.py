"""The inbox: record a message in the transaction that applies it; the primary key rejects duplicates."""

from txbox.inbox.inbox import Inbox, Recorded

__all__ = ["Inbox", "Recorded"]
