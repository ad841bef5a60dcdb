"""The door for spark-submit: the same bulk load as ``txbox bulk-load``, with the same arguments.

::

    spark-submit --master spark://host:7077 spark/txbox_spark/job.py s3a://archive/2026/ \\
        --subscriber billing --message-id event_id --apply account.sql

The driver needs ``txbox[spark,cli]``. Writer jdbc also needs the driver of Postgres on Spark's class path, which
only spark-submit can put there: ``--packages org.postgresql:postgresql:42.7.8``.
"""

import sys
from importlib.metadata import entry_points


def main() -> None:
    """Run ``txbox bulk-load`` with the arguments of this process, and exit."""
    # Found as the shell would find it: this package does not import the command line.
    (program,) = entry_points(group="console_scripts", name="txbox")
    sys.argv = ["txbox", "bulk-load", *sys.argv[1:]]
    program.load()()


if __name__ == "__main__":
    main()
