"""``txbox worker``: run a worker in one process or in several. ``txbox schema``: print the schema of its messages."""
