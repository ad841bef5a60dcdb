"""Version 6: safeguards."""

from django.db import migrations

from txbox_django.operations import Step


class Migration(migrations.Migration):
    """Runs step 6."""

    dependencies = (("txbox_django", "0005_leases"),)
    operations = (Step(6),)
