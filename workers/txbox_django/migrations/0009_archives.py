"""Version 9: archives."""

from django.db import migrations

from txbox_django.operations import Step


class Migration(migrations.Migration):
    """Runs step 9."""

    dependencies = (("txbox_django", "0008_activity"),)
    operations = (Step(9),)
