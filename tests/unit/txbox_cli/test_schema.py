"""`txbox schema`: of what a worker reads, of what a function of Lambda reads, and of a message type."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.program import Ended, own_module

Txbox = Callable[..., Ended]

MODULE = """
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, Field, computed_field
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from txbox import Inbox, Message
from txbox_aws.lambda_ import sqs_handler
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker

BESIDE = {"inbox": Inbox("billing"), "engine": create_engine("postgresql+psycopg://u@127.0.0.1:1/x")}

class Purchase(BaseModel):
    cents: int = 0

    @computed_field
    def euros(self) -> float:
        return self.cents / 100

@dataclass
class Refund:
    note: str = ""

Entry = Annotated[Purchase | Refund, Field(description="An entry of an account.")]

def on_purchase(session: Session, purchases: list[Purchase], messages: list[Message]) -> None: ...

def worker():
    return Worker(MemorySource(), **BESIDE, batch_handler=on_purchase)

plain = Worker(MemorySource(), **BESIDE, handler=print)
function = sqs_handler(**BESIDE, batch_handler=on_purchase)
"""


@pytest.fixture(autouse=True)
def _billing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_module(monkeypatch, tmp_path, "billing", MODULE)


@pytest.mark.parametrize("name", ["worker", "function", "Purchase"])
def test_of_what_is_read(txbox: Txbox, name: str) -> None:
    ended = txbox("schema", f"billing:{name}")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out) == {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": {"cents": {"default": 0, "title": "Cents", "type": "integer"}},
        "title": "Purchase",
        "type": "object",
    }


def test_of_a_union_and_of_what_is_published(txbox: Txbox) -> None:
    entry = json.loads(txbox("schema", "billing:Entry").out)
    assert (entry["description"], set(entry["$defs"])) == ("An entry of an account.", {"Purchase", "Refund"})
    published = json.loads(txbox("schema", "billing:Purchase", "--published").out)
    assert set(published["properties"]) == {"cents", "euros"}


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("plain", "billing:plain is a Worker, whose handler takes messages as they are; annotate"),
        ("on_purchase", "on_purchase(session, purchases, messages), neither a worker nor a message type"),
        ("BESIDE", "billing:BESIDE is a dict, neither a worker nor a message type"),
        ("other", "module billing has no other"),
    ],
)
def test_what_has_none(txbox: Txbox, name: str, fragment: str) -> None:
    txbox("schema", f"billing:{name}").failed_in_one_line(2, fragment)
