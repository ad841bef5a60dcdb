"""Tests of a host's that commit: the next one finds our tables empty."""

import unittest
from typing import Any

import pytest
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from django.conf import settings
from django.db import connection, transaction
from django.test import TransactionTestCase
from sqlalchemy import Engine

import txbox_migrations
from support.django_shop import project
from txbox import Inbox, Outbox
from txbox.maintenance.rotation.conversion import InboxConversion
from txbox.maintenance.rotation.generations import Generations
from txbox_django.testing import EmptiesTxbox, empty_txbox

pytestmark = pytest.mark.usefixtures("django")


def buy(inbox: Inbox, outbox: Outbox) -> bool:
    from support.django_shop.models import Purchase

    with transaction.atomic():
        first = inbox.record(connection, "m1")
        if first:
            Purchase.objects.create(message_id="m1")
            outbox.publish(connection, "own:mail", "m1")
    return first


def cases_of(base: type[Any]) -> unittest.TestSuite:
    class Shop(base):
        def test_one(self) -> None:
            assert buy(Inbox("billing"), Outbox())

        def test_other(self) -> None:
            assert buy(Inbox("billing"), Outbox())

    return unittest.defaultTestLoader.loadTestsFromTestCase(Shop)


def test_each_case_finds_empty_tables(engine: Engine) -> None:
    for base, good in (TransactionTestCase, 1), (EmptiesTxbox, 2):
        empty_txbox()
        result = unittest.TestResult()
        cases_of(base).run(result)
        assert result.testsRun - len(result.failures) - len(result.errors) == good, base
    assert project.purchases() == []


def test_a_rotating_inbox_stays_one(engine: Engine) -> None:
    assert InboxConversion(engine).forward()
    assert buy(Inbox("billing"), Outbox())
    assert Generations(engine).rotate()
    empty_txbox()
    assert len(Generations(engine).list()) == 2
    assert buy(Inbox("billing"), Outbox())
    assert not buy(Inbox("billing"), Outbox())


def test_schema_and_prefix_are_those_of_the_settings(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "TXBOX_PREFIX", "tx_", raising=False)
    inbox, outbox = Inbox("billing", prefix="tx_"), Outbox(prefix="tx_")
    with engine.begin() as other:
        txbox_migrations.upgrade(Operations(MigrationContext.configure(other)), prefix="tx_")
    assert buy(inbox, outbox)
    assert buy(Inbox("billing"), Outbox())
    empty_txbox()
    assert buy(inbox, outbox)
    assert not buy(Inbox("billing"), Outbox())


def test_where_nothing_was_migrated_nothing_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    assert buy(Inbox("billing"), Outbox())
    with monkeypatch.context() as patch:
        patch.setattr(settings, "TXBOX_SCHEMA", "nowhere", raising=False)
        empty_txbox()
    assert not buy(Inbox("billing"), Outbox())
