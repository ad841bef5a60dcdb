"""Settings of Django, as short as they can be."""

import os

from sqlalchemy import make_url

_url = make_url(os.environ["TXBOX_DATABASE_URL"])

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _url.database,
        "USER": _url.username,
        "PASSWORD": _url.password,
        "HOST": _url.host,
        "PORT": _url.port,
    }
}
INSTALLED_APPS = ["txbox_django", "billing"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
