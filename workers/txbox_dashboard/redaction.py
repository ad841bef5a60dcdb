"""Prepares texts of messages for display: redacted, bounded, and always plain text."""

import json
from codecs import getincrementaldecoder
from typing import Literal

from txbox_dashboard.settings import DashboardSettings, Sensitive

SHOWN_CHARACTERS = 20_000
"""The most characters shown of a text. Statements read as many of an error: one that is cut before it is redacted may
hold half of a secret, which the hook does not recognise.
"""

LINE_CHARACTERS = 500
"""The most characters of an error in a table."""

HEX_BYTES = 512
"""The most bytes shown of a body that is not text."""


def redacted(
    settings: DashboardSettings,
    kind: Literal["body", "header", "error"],
    text: str,
    message_id: str,
    subscriber_id: str,
    header: str | None = None,
    *,
    most: int = SHOWN_CHARACTERS,
    whole: str | None = None,
) -> str:
    """Return a text as it may be shown, cut after ``most`` characters; nothing of it if the hook raises.

    ``whole`` says how large the whole is, if the text is only its beginning.
    """
    if settings.redact is not None:
        try:
            text = str(settings.redact(Sensitive(kind, message_id, subscriber_id, header, text)))
        except Exception as error:  # noqa: BLE001 - what cannot be redacted is not shown
            return f"(not shown: redact raised {type(error).__name__})"
    if whole is None and len(text) <= most:
        return text
    return f"{text[:most]}… ({whole or f'{len(text):,} characters'} in all)"


def error_line(settings: DashboardSettings, text: str, message_id: str, subscriber_id: str) -> str:
    """Return an error as a table shows it."""
    return redacted(settings, "error", text, message_id, subscriber_id, most=LINE_CHARACTERS)


def as_text(beginning: bytes, size: int) -> tuple[str, str | None]:
    """Return a body as text: JSON indented, other text as it is, other bytes in hexadecimal digits.

    Args:
        beginning: the body, or the beginning of it.
        size: the size of the whole body, in bytes.

    Returns:
        The text, and how large the whole is, in words, if the text is not all of it.
    """
    whole = f"{size:,} bytes"
    is_cut = len(beginning) < size
    try:
        text = getincrementaldecoder("utf-8")().decode(beginning, final=not is_cut)
    except UnicodeDecodeError:
        return beginning[:HEX_BYTES].hex(" "), whole if size > HEX_BYTES else None
    if is_cut:
        return text, whole
    if len(text) > SHOWN_CHARACTERS:
        return text, None
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False), None
    except (ValueError, RecursionError):
        return text, None
