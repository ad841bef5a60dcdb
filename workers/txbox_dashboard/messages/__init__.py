"""One message: everything that is known of an id."""
