"""Version 2: dead letters."""

from django.db import migrations

from txbox_django.operations import Step


class Migration(migrations.Migration):
    """Runs step 2."""

    dependencies = (("txbox_django", "0001_inbox"),)
    operations = (Step(2),)
