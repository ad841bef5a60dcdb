"""Imports what Spark's Python workers import, once for all that are forked from a daemon of pyspark.

pyspark's daemons import next to nothing, from a zip without compiled files, so each worker takes more than a second to
import pandas, pyarrow and txbox. Python runs this file at its start where ``PYTHONPATH`` names the folder, as the
fixture ``spark`` has it for what its JVM starts.
"""

import gc
import importlib
import sys

IMPORTED = ("pandas", "pyarrow.compute", "psycopg", "sqlalchemy", "pyspark.worker", "txbox_spark", "pyspark_txbox")

if "pyspark.daemon" in sys.orig_argv:
    sys.path[:] = [path for path in sys.path if not path.endswith("pyspark.zip")]  # it is installed, and compiled
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a worker collects garbage after each task, and went through all of these each time
