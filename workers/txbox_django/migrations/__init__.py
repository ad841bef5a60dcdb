"""The versions of txbox's tables as Django migrations; each is one step of ``txbox_migrations``."""
