"""Options of a JVM that lives for minutes."""

import sys
from pathlib import Path

CLASSES = Path(sys.prefix) / ".spark-classes.jsa"
"""Spark's classes as a JVM of this environment has loaded them; `make` has them written, by ``spark_classes.py``."""

_WITH_CLASSES = f" -XX:SharedArchiveFile={CLASSES} -Xlog:disable" if CLASSES.is_file() else ""

SHORT_LIFE = f"-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC -XX:-UsePerfData{_WITH_CLASSES}"
"""Compile once, keep what is compiled, collect garbage in one thread, and find Spark's classes loaded.

Two fifths of the time of a JVM went into compiling a second time, for speed that no test lives to see. A JVM that
compiles once has room for 48 MB of code; the tests of a run fill that, and what is thrown out is compiled again. Half
of the start went into loading classes: a JVM maps them from the file, and passes over one that another Java wrote
(which it would log).
"""
