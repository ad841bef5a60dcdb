"""Rotation: an inbox in generations, of which the newest records ids and the oldest is dropped at once."""

from txbox.maintenance.rotation.conversion import InboxConversion
from txbox.maintenance.rotation.generations import Generation, Generations

__all__ = ["Generation", "Generations", "InboxConversion"]
