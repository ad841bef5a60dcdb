"""Spark beside the inbox: sessions that can reach Postgres over JDBC."""

from txbox_spark.session import JDBC_DRIVER, SparkSetupError, require_jdk, spark_session

__all__ = ["JDBC_DRIVER", "SparkSetupError", "require_jdk", "spark_session"]
