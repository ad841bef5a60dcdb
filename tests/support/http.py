"""Asking a server of ours."""

import urllib.error
import urllib.request


def answer(url: str) -> tuple[int, str]:
    """Return the status and the text of what a URL answers, also of an error."""
    try:
        with urllib.request.urlopen(url, timeout=10) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
