"""What waits to be sent, who sends it, and what holds it up."""
