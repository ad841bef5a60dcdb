"""``manage.py txbox_worker MODULE:NAME``: run a worker or a relay until SIGTERM or Ctrl-C."""

from argparse import ArgumentParser
from importlib import import_module
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from txbox import TxboxError
from txbox.service import Service


class Command(BaseCommand):
    help = "Run a txbox worker, or a relay, until SIGTERM or Ctrl-C; what is under way is finished first."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "worker", metavar="MODULE:NAME", help="a worker, or a function that makes one: shop.worker:make_worker"
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        target = options["worker"]
        module_name, _, name = target.partition(":")
        try:
            found = getattr(import_module(module_name), name)
        except TxboxError as error:
            raise CommandError(str(error)) from error
        except (ImportError, AttributeError, ValueError) as error:
            if isinstance(error, ImportError) and not f"{module_name}.".startswith(f"{error.name}."):
                raise CommandError(f"module {module_name} failed: {error}; --traceback shows where") from error
            raise CommandError(
                f"{target} cannot be imported: {error}; give MODULE:NAME, as in shop.worker:make_worker"
            ) from error
        try:
            service = found if isinstance(found, Service) else found()
            if not isinstance(service, Service):
                raise CommandError(
                    f"{target} must be a worker, or a function that makes one, not {type(service).__name__}"
                )
            self.stdout.write(f"{target} is at work; Ctrl-C finishes and stops")
            self.stdout.flush()
            if not service.run():
                raise CommandError(f"{target} was stopped, but did not finish in time")
        except TxboxError as error:
            raise CommandError(str(error)) from error
        self.stdout.write("stopped")
