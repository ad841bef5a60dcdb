"""Pauses: subscribers whose messages nobody is to process, and destinations to which nobody is to send, for now."""

from txbox.pauses.pauses import Pause, find_named, pause, read_pauses, resume

__all__ = ["Pause", "find_named", "pause", "read_pauses", "resume"]
