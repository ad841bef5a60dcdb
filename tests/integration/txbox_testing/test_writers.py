"""Both writers of bulk loads keep the promises of the port."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from txbox_spark.loading.context import LoadContext
from txbox_spark.loading.copy_writer import CopyWriter
from txbox_spark.loading.jdbc_writer import JdbcWriter
from txbox_spark.loading.writer import Writer
from txbox_testing.conformance.writer import WriterConformance

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass
class Load:
    spark: "SparkSession"
    url: str
    name: str

    def writer(self, context: LoadContext) -> Writer:
        return CopyWriter(context) if self.name == "copy" else JdbcWriter(context)


class TestWriters(WriterConformance):
    @pytest.fixture(params=["copy", "jdbc"])
    def loads(self, request: pytest.FixtureRequest, spark: "SparkSession", schema_url: str) -> Load:
        return Load(spark, schema_url, request.param)
