"""The extras, and what to say where one is not installed: ``pip install 'txbox[http]'``."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from txbox.errors import ExtraMissing

__all__ = ["MODULES", "needs", "require"]

MODULES = {
    "aws": ("boto3", "botocore"),
    "celery": ("celery", "kombu"),
    "cli": ("typer", "rich", "pydantic", "pydantic_settings"),
    "dashboard": ("jinja2", "starlette", "uvicorn"),
    "django": ("django",),
    "http": ("anyio", "starlette"),
    "otel": ("opentelemetry",),
    "prometheus": ("prometheus_client",),
    "spark": ("pandas", "py4j", "pyarrow", "pyspark"),
}
"""The modules that an extra brings, of those that our code imports."""


def require(extra: str) -> None:
    """Raise ``ExtraMissing`` unless the extra's modules are there; none of them is imported."""
    for name in MODULES[extra]:
        if find_spec(name) is None:
            raise ExtraMissing(extra, name)


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Import within this what an extra brings: ``with needs("http"): import starlette``.

    Raises:
        ExtraMissing: one of the extra's modules is not there. Any other missing module is not the extra's, and its
            ``ModuleNotFoundError`` passes through.
    """
    try:
        yield
    except ExtraMissing:
        raise
    except ModuleNotFoundError as error:
        name = error.name or ""
        if name.partition(".")[0] not in MODULES[extra]:
            raise
        raise ExtraMissing(extra, name) from error
