"""Watermarks: apply each event of an aggregate once, in the order of its sequence, with one row per aggregate."""

from txbox.watermarks.watermarks import WAIT_SECONDS, Advance, Watermarks

__all__ = ["WAIT_SECONDS", "Advance", "Watermarks"]
