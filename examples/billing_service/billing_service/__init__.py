"""A service that keeps accounts, and embeds a txbox worker."""
