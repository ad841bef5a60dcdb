"""What becomes of deliveries: the transactions of their handlers, retries, counted attempts and parking."""
