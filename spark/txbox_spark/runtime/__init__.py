"""Spark and its JVM: sessions, jobs, JDBC, and explanations of their errors."""
