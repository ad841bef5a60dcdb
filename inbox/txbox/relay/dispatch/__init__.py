"""What hands messages to publishers: the dispatcher, its calls, their size, and the order of each key."""
