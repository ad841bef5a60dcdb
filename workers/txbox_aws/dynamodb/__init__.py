"""DynamoDB: a ledger of leases, and message ids in items."""

from txbox_aws.clients import dynamodb_client
from txbox_aws.dynamodb.ledger import DynamoDBLedger
from txbox_aws.dynamodb.table import create_lease_table

__all__ = ["DynamoDBLedger", "create_lease_table", "dynamodb_client"]
