"""txbox and AWS: SQS, SNS, EventBridge, Lambda, DynamoDB and Step Functions. Nothing else imports boto3."""
