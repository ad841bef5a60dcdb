"""The command line: ``txbox``.

Every failure is one line on stderr that says what to do. The exit status is 1 (it failed) or 2 (wrong usage).
``--debug`` adds a traceback.
"""

import os
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Run ``txbox`` with this process's arguments, and exit."""
    try:
        from txbox.errors import ExtraMissing
        from txbox.extras import require

        require("cli")  # each command imports what it needs when it runs
        from txbox_cli.app import run

        status = run()
    except KeyboardInterrupt:  # during this import, or a second one while the command ends
        status = 130
    except ExtraMissing as error:
        sys.stderr.write(f"txbox: {error}\n")
        status = 1
    # Python still has to end threads and libraries, and would print a traceback if an interrupt came then.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    sys.exit(status)
