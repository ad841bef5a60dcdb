"""Maintenance: forget what has been kept long enough, with one maintainer at work at a time."""

from txbox.maintenance.maintainer import Maintainer, MaintenanceReport, PlannedTask
from txbox.maintenance.retention import Retention

__all__ = ["Maintainer", "MaintenanceReport", "PlannedTask", "Retention"]
