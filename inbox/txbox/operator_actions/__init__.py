"""What people have done: on record, beside what it has changed."""

from txbox.operator_actions.operator_actions import AUDIT, OperatorAction, note_action, read_actions

__all__ = ["AUDIT", "OperatorAction", "note_action", "read_actions"]
