"""All subscribers at a glance, and one of them."""
