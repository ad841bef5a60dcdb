"""A project of Django's in a test: on which database, and what is in it."""

from typing import Any

import django
import pytest
from django.conf import settings
from django.db import connections
from sqlalchemy import make_url

from txbox.errors import SchemaMissing


def database(url: str) -> dict[str, Any]:
    """Return what DATABASES has for a URL of SQLAlchemy's."""
    parts = make_url(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.database,
        "USER": parts.username,
        "PASSWORD": parts.password,
        "HOST": parts.host,
        "PORT": parts.port,
        "OPTIONS": dict(parts.query),
    }


def environment(url: str) -> dict[str, str]:
    """Return the variables that a process of the project needs."""
    return {"DJANGO_SETTINGS_MODULE": "support.django_shop.settings", "SHOP_DATABASE_URL": url}


def use(url: str) -> None:
    """Have Django use a database from now on: its settings are read once in a process."""
    if not settings.configured:
        # For other programs that tests start, Celery first of all, the variables would make a project of Django's.
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment(url).items():
                patch.setenv(name, value)
            patch.setattr(SchemaMissing, "remedy", SchemaMissing.remedy)  # nor are tables theirs to migrate
            django.setup()
    for alias in ("default", "other"):
        connections[alias].close()
        connections[alias].settings_dict.update(database(url))


def make_tables() -> None:
    """Make the tables of the models."""
    from support.django_shop.models import Purchase

    with connections["default"].schema_editor() as editor:
        editor.create_model(Purchase)


def purchases() -> list[str]:
    """Return the messages that were applied, in order."""
    from support.django_shop.models import Purchase

    return list(Purchase.objects.order_by("id").values_list("message_id", flat=True))
