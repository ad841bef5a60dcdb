"""The application that INSTALLED_APPS names."""

from django.apps import AppConfig

from txbox import SchemaMissing


class TxboxConfig(AppConfig):
    """Brings migrations and a command; it has no models: the tables are txbox's own."""

    name = "txbox_django"
    verbose_name = "txbox"

    def ready(self) -> None:
        """Have errors about missing tables name the command that makes them here."""
        SchemaMissing.remedy = "`python manage.py migrate`"
