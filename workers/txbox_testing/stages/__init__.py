"""What a fault needs to happen: workers and relays whose lives a test controls."""
