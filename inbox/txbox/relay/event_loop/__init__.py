"""What sends by coroutines: one event loop, one thread that claims, reads and settles for it, and their session."""
