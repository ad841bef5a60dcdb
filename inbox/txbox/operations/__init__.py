"""What operators do: pause, act on record, and audit."""
