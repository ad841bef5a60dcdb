"""Rotation: an inbox in generations, of which the newest takes what is recorded and the oldest goes at once."""

from txbox.maintenance.rotation.conversion import InboxConversion
from txbox.maintenance.rotation.generations import Generation, Generations

__all__ = ["Generation", "Generations", "InboxConversion"]
