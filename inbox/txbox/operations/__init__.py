"""What operators do: pause, take actions that are kept on record, and audit."""
