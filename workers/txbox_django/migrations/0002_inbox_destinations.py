"""Version 11: how far ``inbox:`` destinations were begun, and the subscriptions of topics."""

from django.db import migrations

from txbox_django.operations import MigrationStep


class Migration(migrations.Migration):
    """Creates two tables."""

    dependencies = (("txbox_django", "0001_baseline"),)
    operations = (MigrationStep(11),)
