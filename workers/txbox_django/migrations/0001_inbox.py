"""Version 1: inbox."""

from django.db import migrations

from txbox_django.operations import Step


class Migration(migrations.Migration):
    """Runs step 1."""

    operations = (Step(1),)
