"""Maintenance: what was kept long enough is forgotten, by one maintainer at a time."""

from txbox.maintenance.maintainer import Maintainer, MaintenanceReport, PlannedTask
from txbox.maintenance.retention import Retention

__all__ = ["Maintainer", "MaintenanceReport", "PlannedTask", "Retention"]
