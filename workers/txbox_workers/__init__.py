"""Programs around the inbox: workers, the command line, the demo."""
