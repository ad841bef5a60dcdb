"""The edge where environment variables are read. AWS's are boto3's own business."""

import os

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["Settings", "aws_endpoint"]


class Settings(BaseSettings):
    """What the environment says; the command line's options come before it."""

    model_config = SettingsConfigDict(env_prefix="TXBOX_", extra="ignore")

    database_url: SecretStr | None = Field(default=None, description="the database, as an SQLAlchemy URL")
    database_schema: str | None = Field(default=None, description="the schema of the tables")
    table_prefix: str = Field(default="", description="what the tables' names start with")


def aws_endpoint() -> str | None:
    """Where boto3 will look for SQS, if that is not AWS itself."""
    return os.environ.get("AWS_ENDPOINT_URL_SQS") or os.environ.get("AWS_ENDPOINT_URL")
