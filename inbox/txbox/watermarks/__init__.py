"""Watermarks: apply each event of an aggregate once, in the order of its sequence, with one row per aggregate."""

from txbox.watermarks.watermark import WAIT_SECONDS, Advance, advance, advance_from, advance_many

__all__ = ["WAIT_SECONDS", "Advance", "advance", "advance_from", "advance_many"]
