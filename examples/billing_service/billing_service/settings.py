"""What the environment says; AWS's variables are boto3's own business."""

import os


def database_url() -> str:
    """Return the URL of the database that holds the accounts and the inbox."""
    return os.environ["TXBOX_DATABASE_URL"]


def queue_name() -> str:
    """Return the name of the queue."""
    return os.environ.get("QUEUE_NAME", "purchases")


def port() -> int:
    """Return the port to listen on."""
    return int(os.environ.get("PORT", "8000"))
