"""The command line: ``txbox``.

Every failure is one line on stderr that says what to do, and exit status 1 (it failed) or 2 (it was asked wrongly).
A traceback is shown only with ``--debug``.
"""

import os
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Run ``txbox`` with the arguments of this process, and exit."""
    try:
        from txbox.errors import ExtraMissing
        from txbox.extras import require

        require("cli")  # a command imports what it uses as it runs
        from txbox_cli.app import run

        status = run()
    except KeyboardInterrupt:  # while this is imported, or once more while the command ends
        status = 130
    except ExtraMissing as error:
        sys.stderr.write(f"txbox: {error}\n")
        status = 1
    # Python has yet to end threads and libraries, and would show where an interrupt meets them.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    sys.exit(status)
