"""Version 7: operations."""

from django.db import migrations

from txbox_django.operations import Step


class Migration(migrations.Migration):
    """Runs step 7."""

    dependencies = (("txbox_django", "0006_safeguards"),)
    operations = (Step(7),)
