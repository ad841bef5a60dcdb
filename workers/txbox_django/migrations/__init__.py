"""The versions of txbox's tables, as migrations of Django; each is one step of ``txbox_migrations``."""
