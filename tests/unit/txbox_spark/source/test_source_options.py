"""What the options of a write come to."""

import socket
from pathlib import Path

import pytest

from txbox_spark.source.source_options import write_options

GIVEN = {"url": "postgresql://db/shop", "subscriber": "a", "message_id": "id", "apply": "SELECT FROM fresh_event"}


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("s3a://lake/checkpoints/billing", "s3a://lake/checkpoints/billing"),
        ("/checkpoints/billing", "HOST:/checkpoints/billing"),
        ("file:/checkpoints/billing", "HOST:/checkpoints/billing"),
        ("file:///checkpoints/billing", "HOST:/checkpoints/billing"),
        ("billing", "HOST:HERE/billing"),
        (None, None),
    ],
)
def test_a_streams_checkpoint_is_one_of_this_machine_or_of_all(given: str | None, place: str | None) -> None:
    expected = place and place.replace("HOST", socket.gethostname()).replace("HERE", str(Path.cwd()))
    options = write_options(GIVEN if given is None else {**GIVEN, "checkpointLocation": given})
    assert options.checkpoint == expected
