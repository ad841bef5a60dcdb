"""The application that INSTALLED_APPS names."""

from django.apps import AppConfig


class TxboxConfig(AppConfig):
    """Brings migrations and a command; it has no models: the tables are txbox's own."""

    name = "txbox_django"
    verbose_name = "txbox"
