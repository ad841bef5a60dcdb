"""Redrives and discards that a page requests."""

from txbox.dead_letters import OperationKind
from txbox.errors import InvalidConfiguration, OperationNotFound
from txbox_dashboard.actions import NOTE_CHARACTERS, Action, ActionRefused
from txbox_dashboard.letters.finder import FIELDS, filter_of


def redrive(action: Action) -> str:
    return _select(action, OperationKind.REDRIVE)


def discard(action: Action) -> str:
    return _select(action, OperationKind.DISCARD)


def resume(action: Action) -> str:
    """Resume an operation that was ended, or retry what has failed."""
    operation = _operation(action)
    queue_url = action.runner.operations.get(operation).options.get("queue_url")
    with action.recorded("resume operation", str(operation)):
        action.runner.start(operation, action.who, queue_url)
    return "/letters#operations"


def stop(action: Action) -> str:
    """End an operation after the letter in hand."""
    operation = _operation(action)
    if operation not in action.runner.running():
        raise ActionRefused("This dashboard does not carry it out: it has ended, or another process is at it.")
    with action.recorded("stop operation", str(operation)):
        action.runner.stop(operation)
    return "/letters#operations"


def _select(action: Action, kind: OperationKind) -> str:
    note = action.form.get("note", "").strip()[:NOTE_CHARACTERS] or None
    try:
        given = {name: action.form.get(name, "") for name in FIELDS}
        which = filter_of(given, errors_hidden=action.settings.redact is not None)
        if which.numbers is not None and not which.numbers:
            raise ActionRefused("No letter was chosen.")
        if which.up_to is None:
            raise ActionRefused("Which letters were counted is not said: go by the page that counts them.")
        operation = action.runner.operations.select(
            which, kind, by=action.who, note=note, expired=action.form.get("expired") == "yes"
        )
    except InvalidConfiguration as error:
        raise ActionRefused(str(error)) from error
    if operation is None:
        raise ActionRefused("There are no such letters any more: they were redriven, discarded or deleted meanwhile.")
    action.log(f"{kind.value} {operation.letters} dead letters", f"operation {operation.operation_id}")
    action.runner.start(operation.operation_id, action.who)
    return "/letters#operations"


def _operation(action: Action) -> int:
    text = action.form.get("operation", "")
    if not (text.isascii() and text.isdigit() and len(text) < _DIGITS):
        raise ActionRefused("This is no operation.")
    try:
        return action.runner.operations.get(int(text)).operation_id
    except OperationNotFound as error:
        raise ActionRefused(str(error)) from error


_DIGITS = 19
