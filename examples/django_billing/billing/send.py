"""Sends three purchases, each twice, and shows the accounts once all are processed."""

import json
import os
import time

import django

from txbox_aws.sqs import sqs_client

django.setup()

PURCHASES = {"p-1": ("ann", 2500), "p-2": ("ann", 1999), "p-3": ("bob", 100)}


def main():
    """Send, wait, and print."""
    from billing.models import Account

    queue_url = os.environ["QUEUE_URL"]
    sqs = sqs_client(queue_url)
    for purchase_id, (account_id, cents) in [*PURCHASES.items(), *PURCHASES.items()]:
        sqs.send_message(
            QueueUrl=queue_url,
            MessageBody=json.dumps({"account_id": account_id, "cents": cents}),
            MessageAttributes={"message-id": {"DataType": "String", "StringValue": purchase_id}},
        )
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    while set(sqs.get_queue_attributes(QueueUrl=queue_url, AttributeNames=names)["Attributes"].values()) != {"0"}:
        time.sleep(0.2)  # nothing signals that a queue is empty
    for account in Account.objects.order_by("pk"):
        print(account.pk, account.cents)


if __name__ == "__main__":
    main()
