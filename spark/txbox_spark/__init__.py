"""txbox."""
