"""A small application of Celery: its tasks, and the processes that run them."""
