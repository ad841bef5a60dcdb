"""Settings of Django for the tests, which are made once in a process, and may name another database later."""

from typing import Any

import django
from django.conf import settings
from django.db import connections
from sqlalchemy import make_url


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


def use(url: str) -> None:
    """Have Django use a database from now on."""
    of_url = database(url)
    if not settings.configured:
        settings.configure(
            DATABASES={"default": of_url, "other": dict(of_url)},
            INSTALLED_APPS=["txbox_django", "support.django_shop"],
            DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
            USE_TZ=False,  # Django's readers take the zone of a time away then: ours must not be theirs
            TIME_ZONE="Asia/Tokyo",
        )
        django.setup()
    for alias in ("default", "other"):
        connections[alias].close()
        connections[alias].settings_dict.update(of_url)


def make_tables() -> None:
    """Make the tables of the models."""
    from support.django_shop.models import Purchase

    with connections["default"].schema_editor() as editor:
        editor.create_model(Purchase)


def purchases() -> list[str]:
    """Return the messages that were applied, in order."""
    from support.django_shop.models import Purchase

    return list(Purchase.objects.order_by("id").values_list("message_id", flat=True))
