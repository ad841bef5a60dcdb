"""Version 10: responses to HTTP requests."""

from django.db import migrations

from txbox_django.operations import Step


class Migration(migrations.Migration):
    """Runs step 10."""

    dependencies = (("txbox_django", "0009_archives"),)
    operations = (Step(10),)
