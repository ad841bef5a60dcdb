"""Version 4: outbox."""

from django.db import migrations

from txbox_django.operations import Step


class Migration(migrations.Migration):
    """Runs step 4."""

    dependencies = (("txbox_django", "0003_bulk_loads"),)
    operations = (Step(4),)
