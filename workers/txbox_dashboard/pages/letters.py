"""Dead letters: the list, one of them, and what a person does with them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from txbox import Reason
from txbox.dead_letters import OperationKind
from txbox.dead_letters.letter import letter_from
from txbox.errors import InvalidConfiguration, OperationNotFound
from txbox.postgres.sql import with_moments
from txbox_dashboard.actions import NOTE_CHARACTERS, Action, ActionRefused
from txbox_dashboard.pages.letter_finder import (
    FIELDS,
    NEWEST,
    FoundLetters,
    LetterStatements,
    count,
    filter_of,
    find,
    newest,
    values_of,
)
from txbox_dashboard.redaction import as_text, error_line, redacted
from txbox_dashboard.settings import DashboardSettings
from txbox_dashboard.view import Page, Request

PAGE = 50

BODY_BYTES = 128 * 1024
"""Bytes read of a body: more than are shown, so that a secret cut off at their end is not shown."""

SHOWN_OPERATIONS = 10
COUNTED = 2000
"""The most letters counted of an operation."""


def letters(request: Request) -> Page:
    """Show the dead letters of a filter, and the last redrives and discards."""
    given = {name: request.query.get(name, "") for name in FIELDS}
    every = request.query.get("all") == "yes"
    refused, found = None, FoundLetters((), None, None)
    try:
        which = filter_of(given, errors_hidden=request.settings.redact is not None)
        found = find(request.reader, which, every=every, before=request.number("before", NEWEST), page=PAGE)
    except InvalidConfiguration as error:
        refused = str(error)
    for one in found.letters:
        one["error"] = error_line(request.settings, one["error"], one["message_id"], one["subscriber_id"])
    runner = request.runner
    sql = LetterStatements.load(request.reader.schema, request.reader.prefix)
    asked = {"limit": SHOWN_OPERATIONS, "counted": COUNTED}
    operations = [
        with_moments(row, "requested_at", "finished_at")
        for row in request.reader.rows("redrives and discards", sql.last_operations, asked) or ()
    ]
    for operation in operations:
        operation["running"] = operation["operation_id"] in runner.running()
        problem = runner.error(operation["operation_id"])
        operation["problem"] = problem and error_line(request.settings, problem, "", "")
        operation["filter"] = _shown_filter(operation["filter"], request.settings)
    return Page(
        "letters.html",
        {
            "given": given,
            "every": every,
            "refused": refused,
            "found": found,
            "reasons": list(Reason),
            "suggested": values_of(request.reader),
            "operations": operations,
            "counted": COUNTED,
            "is_filtered": any(given.values()),
            "errors_hidden": request.settings.redact is not None,
            "is_first": "before" not in request.query,
        },
    )


def _shown_filter(given: Mapping[str, Any], settings: DashboardSettings) -> dict[str, Any]:
    """Return an operation's filter. What it looks for in headers and bodies is shown only where those are shown."""
    shown = dict(given)
    if "error" in given:
        shown["error"] = redacted(settings, "error", given["error"], "", "")
    if "headers" in given:
        shown["headers"] = ", ".join(
            f"{name} {redacted(settings, 'header', value, '', '', name)}" if settings.show_bodies else name
            for name, value in sorted(given["headers"].items())
        )
    if "json_path" in given:
        shown["json_path"] = (
            redacted(settings, "body", given["json_path"], "", "") if settings.show_bodies else "hidden"
        )
    return shown


def letter(request: Request) -> Page:
    """Show one dead letter, with its headers and the beginning of its body only if that is allowed."""
    number = request.number("number", 0)
    asked = {"number": number, "body_from": 0, "body_bytes": BODY_BYTES if request.settings.show_bodies else 0}
    sql = LetterStatements.load(request.reader.schema, request.reader.prefix)
    rows = request.reader.rows("the letter", sql.one_letter, asked)
    if rows is not None and not rows:
        return Page("problem.html", {"title": "There is none", "text": f"There is no dead letter {number}."}, 404)
    if not rows:
        text = f"Dead letter {number}: {request.reader.left_out['the letter']}."
        return Page("problem.html", {"title": "Not read", "text": text}, 503)
    found, settings = letter_from(rows[0]), request.settings
    operations = request.reader.rows("its operations", sql.operations_of, {"number": number}) or ()

    body, whole_body = as_text(found.body, found.body_size or 0)

    def shown(kind: Any, text: str, header: str | None = None, *, whole: str | None = None) -> str:
        return redacted(settings, kind, text, found.message_id, found.subscriber_id, header, whole=whole)

    history = [
        {"at": each.get("at"), "delivery": each.get("delivery"), "error": shown("error", str(each.get("error", "")))}
        for each in found.history
    ]
    return Page(
        "letter.html",
        {
            "number": number,
            "letter": found,
            "error": shown("error", found.error),
            "history": history,
            "operations": [
                {**with_moments(row, "done_at"), "error": row["error"] and shown("error", row["error"])}
                for row in operations
            ],
            "show_bodies": settings.show_bodies,
            "body": shown("body", body, whole=whole_body) if settings.show_bodies else None,
            "headers": {name: shown("header", value, name) for name, value in sorted(found.headers.items())}
            if settings.show_bodies
            else {},
            "envelope": shown("body", json.dumps(dict(found.envelope), indent=2, ensure_ascii=False))
            if settings.show_bodies
            else None,
        },
    )


def confirm(request: Request) -> Page:
    """Show what a redrive or discard would do before it is done."""
    action = "discard" if request.query.get("action") == "discard" else "redrive"
    given = {name: request.query.get(name, "") for name in FIELDS}
    if request.query.get("chosen") == "yes":
        given["numbers"] = ",".join(request.query.getlist("number"))
        if not given["numbers"]:
            return Page("problem.html", {"title": "Not done", "text": "No letter was chosen."}, 400)
    try:
        which = filter_of(given, errors_hidden=request.settings.redact is not None)
    except InvalidConfiguration as error:
        return Page("problem.html", {"title": "Not done", "text": str(error)}, 400)
    # Letters parked from now on were not counted, and are not meant.
    highest = newest(request.reader)
    if highest is None:
        text = f"The letters could not be counted: {request.reader.left_out['dead letters']}."
        return Page("problem.html", {"title": "Not done", "text": text}, 503)
    given["up_to"] = str(highest)
    counts, exact = count(request.reader, replace(which, up_to=highest))
    return Page(
        "confirm.html",
        {
            "action": action,
            "given": {name: value for name, value in given.items() if value},
            "counts": [(of, reason, letters) for (of, reason), letters in sorted(counts.items())],
            "exact": exact,
            "total": sum(counts.values()),
            "expired": any(reason == Reason.EXPIRED for _, reason in counts),
        },
    )


def redrive(action: Action) -> str:
    return _select(action, OperationKind.REDRIVE)


def discard(action: Action) -> str:
    return _select(action, OperationKind.DISCARD)


def resume_operation(action: Action) -> str:
    """Resume an operation that was ended, or retry what has failed."""
    operation = _operation(action)
    queue_url = action.runner.operations.get(operation).options.get("queue_url")
    with action.recorded("resume operation", str(operation)):
        action.runner.start(operation, action.who, queue_url)
    return "/letters#operations"


def stop_operation(action: Action) -> str:
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
