"""Purchases: an archive of all of them in a file, and the newest of them once more through the queue."""

import json
import os
from pathlib import Path

import boto3

ALL, LIVE = 900, 90

purchases = [
    {"event_id": f"p-{number:03}", "customer_id": f"customer-{number % 7}", "cents": number}
    for number in range(1, ALL + 1)
]
Path("purchases.jsonl").write_text("".join(f"{json.dumps(purchase)}\n" for purchase in purchases))

sqs = boto3.client("sqs")
for start in range(ALL - LIVE, ALL, 10):
    sqs.send_message_batch(
        QueueUrl=os.environ["QUEUE_URL"],
        Entries=[
            {
                "Id": purchase["event_id"],
                "MessageBody": json.dumps(purchase),
                # The id that the bulk load takes from the column event_id.
                "MessageAttributes": {"message-id": {"DataType": "String", "StringValue": purchase["event_id"]}},
            }
            for purchase in purchases[start : start + 10]
        ],
    )
print(f"{ALL} archived, {LIVE} of them sent; all of them cost {sum(each['cents'] for each in purchases)} cents")
