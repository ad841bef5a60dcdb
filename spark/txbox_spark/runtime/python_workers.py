"""What tasks do for the Python processes that Spark runs them in, one after another."""

import gc


def freeze_modules() -> None:
    """Exempt what this process has loaded from garbage collection; do nothing if it has done so before.

    pyspark collects garbage after every task, and a collection that visits all of our modules takes 70 ms. Freezing
    only once keeps the garbage of later tasks collectable.
    """
    if not gc.get_freeze_count():
        gc.freeze()
