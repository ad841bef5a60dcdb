"""Version 10, the baseline: all tables."""

from django.db import migrations

from txbox_django.operations import MigrationStep


class Migration(migrations.Migration):
    """Creates all tables.

    It counts as applied if the last of the ten migrations before the baseline is recorded. Only that one is named: if
    ``replaces`` named several and only some of them were recorded, Django would silently skip the migration. So
    ``MigrationStep`` runs if fewer of the ten are recorded, and says what brings such tables to the baseline.
    """

    replaces = (("txbox_django", "0010_responses"),)
    operations = (MigrationStep(10),)
