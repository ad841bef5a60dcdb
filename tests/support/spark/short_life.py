"""Options of a JVM that lives for minutes."""

SHORT_LIFE = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC -XX:-UsePerfData"
"""Compile once, keep what is compiled, and collect garbage in one thread.

Two fifths of the time of a JVM went into compiling a second time, for speed that no test lives to see. A JVM that
compiles once has room for 48 MB of code; the tests of a run fill that, and what is thrown out is compiled again.
"""
