"""HTTP: do requests with the header Idempotency-Key once, for Starlette and FastAPI."""

from txbox.extras import needs

with needs("http"):
    from txbox_http.idempotency import Idempotency, everyone
    from txbox_http.in_transaction import InTransaction
    from txbox_http.keys import message_id
    from txbox_http.middleware import IdempotencyMiddleware, posts_and_patches
    from txbox_http.strength import Answered
    from txbox_http.under_lease import UnderLease

__all__ = [
    "Answered",
    "Idempotency",
    "IdempotencyMiddleware",
    "InTransaction",
    "UnderLease",
    "everyone",
    "message_id",
    "posts_and_patches",
]
