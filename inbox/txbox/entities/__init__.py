"""Ids in business entities: the row that a message changes remembers the message."""

from txbox.entities.entity import MAX_KEPT, HighestEventIds, RecentMessageIds, update_if_newer, update_once

__all__ = ["MAX_KEPT", "HighestEventIds", "RecentMessageIds", "update_if_newer", "update_once"]
