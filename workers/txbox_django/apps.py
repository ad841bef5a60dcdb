"""The application that INSTALLED_APPS names."""

from django.apps import AppConfig

from txbox import SchemaMissing


class TxboxConfig(AppConfig):
    """Provides migrations and a command. It has no models: the tables are txbox's own."""

    name = "txbox_django"
    verbose_name = "txbox"

    def ready(self) -> None:
        """Make errors about missing tables name the Django command that creates them."""
        SchemaMissing.remedy = "`python manage.py migrate`"
