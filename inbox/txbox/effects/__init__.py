"""Effects in SQL: statements over ``fresh_event`` that workers, Lambda and bulk loads apply alike."""

from txbox.effects.fields import Field
from txbox.effects.sql_effect import SqlEffect
from txbox.effects.upsert import Upsert

__all__ = ["Field", "SqlEffect", "Upsert"]
