"""Settings of Django: for the tests' own process, and for ``python -m django`` in others."""

import os

from support.django_shop.project import database

DATABASES = {alias: database(os.environ["SHOP_DATABASE_URL"]) for alias in ("default", "other")}
INSTALLED_APPS = ["txbox_django", "support.django_shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = False  # Django's readers take the zone of a time away then: ours must not be theirs
TIME_ZONE = "Asia/Tokyo"
