"""The revisions; revision N runs step N."""
