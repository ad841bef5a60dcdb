"""The dashboard: live pages that show a database's messages, and act on them if that is allowed.

::

    from txbox_dashboard import dashboard

    app.mount("/txbox", dashboard(engine))          # in a service of FastAPI or Starlette

Or ``txbox dashboard``, as a process. Needs the extra ``dashboard``. Everything shown is read from Postgres:
a role that may only read is enough.
"""

from txbox.extras import needs

with needs("dashboard"):
    from txbox_dashboard.app import dashboard
    from txbox_dashboard.settings import Sensitive

__all__ = ["Sensitive", "dashboard"]
