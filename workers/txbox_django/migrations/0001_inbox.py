"""Version 1: inbox."""

from django.db import migrations

from txbox_django.operations import Step


class Migration(migrations.Migration):
    """Runs step 1."""

    dependencies = []
    operations = [Step(1)]
