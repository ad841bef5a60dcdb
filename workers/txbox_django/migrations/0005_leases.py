"""Version 5: leases."""

from django.db import migrations

from txbox_django.operations import Step


class Migration(migrations.Migration):
    """Runs step 5."""

    dependencies = (("txbox_django", "0004_outbox"),)
    operations = (Step(5),)
