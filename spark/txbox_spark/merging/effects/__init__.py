"""The effect of a load: looked at before anything is merged, and run in each chunk's transaction."""
