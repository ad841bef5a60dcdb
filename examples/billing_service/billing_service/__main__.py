"""``python -m billing_service``: serve until SIGTERM or SIGINT, drain, exit with status 0."""

import logging
import signal
import sys
from types import FrameType

import uvicorn

from billing_service import settings
from billing_service.app import app


def main() -> None:
    """Run the service."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        sys.exit(0)

    # uvicorn raises the signal again after its own shutdown: by then everything is drained, and this is the end.
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    logging.basicConfig(level=logging.INFO)
    uvicorn.run(app, host="127.0.0.1", port=settings.port(), log_config=None)


if __name__ == "__main__":
    main()
