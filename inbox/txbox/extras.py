"""The extras, and the error that names one that is not installed."""

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
"""By extra, the modules it brings that our code imports."""


def require(extra: str) -> None:
    """Raise ``ExtraMissing`` unless the extra's modules can be found; import none of them."""
    for name in MODULES[extra]:
        if find_spec(name) is None:
            raise ExtraMissing(extra, name)


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Turn a failed import inside the block into ``ExtraMissing``: ``with needs("http"): import starlette``.

    Raises:
        ExtraMissing: one of the extra's modules is missing. The ``ModuleNotFoundError`` of any other module passes
            through.
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
