"""The worker: ``python -m django txbox_worker billing.worker:make_worker``."""

import os

from billing.models import Account
from django.db.models import F

from txbox import Inbox
from txbox_aws.sqs import SqsWorker
from txbox_django import orm_worker


def add_purchase(message):
    """Add a purchase to its account, in the transaction that records the message."""
    purchase = message.json()
    account, _ = Account.objects.get_or_create(account_id=purchase["account_id"])
    Account.objects.filter(pk=account.pk).update(cents=F("cents") + purchase["cents"])


def make_worker():
    """Make the worker; nothing is connected before it runs."""
    return orm_worker(SqsWorker, os.environ["QUEUE_URL"], inbox=Inbox("billing"), handler=add_purchase, threads=2)
