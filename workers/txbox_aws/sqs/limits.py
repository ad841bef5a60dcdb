"""What SQS allows.

https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/quotas-messages.html
"""

__all__ = ["MAX_ATTRIBUTES", "MAX_BATCH", "MAX_VISIBILITY_SECONDS", "MAX_WAIT_SECONDS"]

MAX_ATTRIBUTES = 10
"""Message attributes of one message."""

MAX_BATCH = 10
"""Messages in one call."""

MAX_VISIBILITY_SECONDS = 12 * 60 * 60
"""How long a delivery can be ours, from its receive, extensions included."""

MAX_WAIT_SECONDS = 20
"""Of long polling."""
