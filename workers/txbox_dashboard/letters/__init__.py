"""Dead letters: find, show, redrive and discard them."""
