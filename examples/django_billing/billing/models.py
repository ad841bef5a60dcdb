"""What purchases are added to."""

from django.db import models


class Account(models.Model):
    """A customer's account."""

    account_id = models.TextField(primary_key=True)
    cents = models.BigIntegerField(default=0)
