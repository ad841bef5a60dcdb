"""txbox for AWS: SQS, SNS, EventBridge, Lambda, DynamoDB and Step Functions. No other package imports boto3."""
