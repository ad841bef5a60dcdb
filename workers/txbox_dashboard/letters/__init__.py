"""Dead letters: found, looked at, redriven and discarded."""
