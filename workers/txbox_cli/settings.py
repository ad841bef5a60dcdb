"""The environment variables that the command line reads. boto3 reads AWS's own, except for those below."""

import os
from collections.abc import Mapping

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Settings from the environment. Options on the command line override them."""

    model_config = SettingsConfigDict(env_prefix="TXBOX_", extra="ignore")

    database_url: SecretStr | None = Field(default=None, description="the database, as an SQLAlchemy URL")
    database_schema: str | None = Field(default=None, description="the schema of the tables")
    dashboard_token: SecretStr | None = Field(default=None, description="what a person gives to use the dashboard")
    table_prefix: str = Field(default="", description="what the tables' names start with")
    keep_inbox: str | None = Field(default=None, description="windows of ids by subscriber: billing=30d *=90d")
    keep_leases: str | None = Field(default=None, description="the window of completed leases")
    keep_results: str | None = Field(default=None, description="the window of their results")
    keep_responses: str | None = Field(default=None, description="the window of responses to HTTP requests")
    keep_letters: str | None = Field(default=None, description="the window of letters that are done")
    keep_operations: str | None = Field(default=None, description="the window of finished redrives and discards")
    keep_sent: str | None = Field(default=None, description="the window of sent messages, for maintain")
    keep_loads: str | None = Field(default=None, description="the window of finished bulk loads")
    keep_staging: str | None = Field(default=None, description="the window of staging tables of loads that were left")


def aws_endpoint() -> str | None:
    """Return the endpoint at which boto3 looks for SQS, or None for AWS itself."""
    return os.environ.get("AWS_ENDPOINT_URL_SQS") or os.environ.get("AWS_ENDPOINT_URL")


def lead_boto3_to(environment: Mapping[str, str]) -> bool:
    """Point boto3 at this environment's servers. Return whether a variable for SQS alone was set, and so removed."""
    os.environ.update(environment)
    return os.environ.pop("AWS_ENDPOINT_URL_SQS", None) is not None


def is_submitted() -> bool:
    """Return whether spark-submit runs this command: it has one stream for a program's output and warnings."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def uses_hadoop() -> bool:
    """Return whether a path without a scheme may be on a distributed file system."""
    return "HADOOP_CONF_DIR" in os.environ
