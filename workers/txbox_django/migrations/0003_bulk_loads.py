"""Version 3: bulk loads."""

from django.db import migrations

from txbox_django.operations import Step


class Migration(migrations.Migration):
    """Runs step 3."""

    dependencies = (("txbox_django", "0002_dead_letters"),)
    operations = (Step(3),)
