"""The business table ``effect`` as classes of SQLAlchemy's ORM."""

from sqlalchemy import BigInteger
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """What sessions that have engines by class are given an engine for."""


class Effect(Base):
    """An effect of a message."""

    __tablename__ = "effect"

    position: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    message_id: Mapped[str]
    body: Mapped[str]
