"""Entry point for spark-submit: the same bulk load as ``txbox bulk-load``, with the same arguments.

::

    spark-submit --master spark://host:7077 spark/txbox_spark/job.py s3a://archive/2026/ \\
        --subscriber billing --message-id event_id --apply account.sql

The driver needs ``txbox[spark,cli]``. Writer jdbc also needs the Postgres driver on Spark's class path. Only
spark-submit can put it there: ``--packages org.postgresql:postgresql:42.7.8``.
"""

import sys
from importlib.metadata import entry_points


def main() -> None:
    """Run ``txbox bulk-load`` with the arguments of this process, and exit."""
    # Look it up as the shell does, because this package must not import the command line.
    (program,) = entry_points(group="console_scripts", name="txbox")
    sys.argv = ["txbox", "bulk-load", *sys.argv[1:]]
    program.load()()


if __name__ == "__main__":
    main()
