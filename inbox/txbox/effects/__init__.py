"""Effects in SQL: statements over ``fresh_event`` that workers, Lambda and bulk loads apply alike."""

from txbox.effects.fields import Field
from txbox.effects.sql_effect import SqlEffect

__all__ = ["Field", "SqlEffect"]
