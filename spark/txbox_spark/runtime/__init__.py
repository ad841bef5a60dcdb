"""Spark and its JVM: sessions, jobs, JDBC, and what their errors mean."""
