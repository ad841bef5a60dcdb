"""``txbox worker``: run a worker of yours, in one process or in several; ``txbox schema``: what its messages are."""
