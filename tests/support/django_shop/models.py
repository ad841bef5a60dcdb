"""What the handlers of the tests change."""

from typing import Any

from django.db import models


class Purchase(models.Model):  # type: ignore[misc]
    """One that was applied; a second one of the same message would be seen."""

    message_id: Any = models.TextField()
    at: Any = models.DateTimeField(auto_now_add=True)
    details: Any = models.JSONField(default=dict)
