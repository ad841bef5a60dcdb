"""Audits: check that every message an outbox has sent is processed or parked in an inbox, and that nothing else is."""

from txbox.operations.audit.auditor import audit, audit_inbox
from txbox.operations.audit.report import AuditReport, Finding, FindingKind, Stretch

__all__ = ["AuditReport", "Finding", "FindingKind", "Stretch", "audit", "audit_inbox"]
