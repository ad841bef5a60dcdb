"""One message: all that is known of an id."""
