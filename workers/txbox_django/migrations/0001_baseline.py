"""Version 10, the baseline: all tables."""

from django.db import migrations

from txbox_django.operations import MigrationStep


class Migration(migrations.Migration):
    """Makes all tables.

    It counts as applied where the last of the ten migrations of before the baseline is recorded. Only that one is
    named: where a part of several names is recorded, Django leaves a migration out without a word. So ``MigrationStep``
    runs where fewer of the ten are recorded, and says what lifts such tables.
    """

    replaces = (("txbox_django", "0010_responses"),)
    operations = (MigrationStep(10),)
