"""Version 8: activity."""

from django.db import migrations

from txbox_django.operations import Step


class Migration(migrations.Migration):
    """Runs step 8."""

    dependencies = (("txbox_django", "0007_operations"),)
    operations = (Step(8),)
