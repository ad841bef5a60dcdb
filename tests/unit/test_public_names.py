"""The public names: what people import is not changed by accident."""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import txbox

REPOSITORY = Path(__file__).parents[2]

PUBLIC = {
    "txbox": """
        AsyncInbox AsyncOutbox
        BrokerError DeadLetter DeadLetters EffectFailed EffectUnknown EntityMissing Expired Failures Identify InFlight
        Inbox InvalidConfiguration InvalidMessageId LeaseLost LedgerError LetterNotFound MalformedMessage Message
        MessageTooLarge Mismatch NotInTransaction NotSendable OperationNotFound OutOfOrder Outbox Outcome Outgoing
        Reason Recorded ResultNotStored RightsMissing SchemaMissing SqlEffect StatementLeftOpen TableLocked
        TransactionAborted TransactionEnded TransactionTimedOut TxboxError idempotent identify
    """,
    "txbox.coroutines": "AsyncInbox AsyncOutbox AsyncWatermarks async_update_if_newer async_update_once",
    "txbox.testing": "kill_at",
    "txbox.leases": "Acquisition LEASE_SECONDS Lease LeaseState Ledger PostgresLedger idempotent",
    "txbox.operations.pauses": "Pause find_named pause read_pauses resume",
    "txbox.messages": "Body MessageType",
    "txbox.inbox.age_judge": "AgeJudge MIN_WINDOW PRODUCER_SLACK UnknownAge",
    "txbox.inbox": "Inbox Recorded",
    "txbox.outbox": "Outbox Outgoing RELAY_SUBSCRIBER Subscription Subscriptions",
    "txbox.dead_letters": """
        DeadLetter DeadLetters Failures HeldKey LetterCount LetterFilter LetterOperation LetterOperations
        LetterOutcome LetterResult OperationKind Reason
    """,
    "txbox.effects": "Field SqlEffect Upsert",
    "txbox.entities": "HighestEventIds MAX_KEPT RecentMessageIds update_if_newer update_once",
    "txbox_aws.dynamodb": "DynamoDBLedger create_lease_table dynamodb_client",
    "txbox_aws.publishers": "AwsPublisher EventBridgePublisher SnsPublisher SqsPublisher aws_publishers",
    "txbox_aws.step_functions": "Execution Executions MAX_INPUT_BYTES execution_name stepfunctions_client",
    "txbox_testing": """
        Delivered Fault NotIdempotent NotSettled PLACES PointResult RelayedMessages TrialReport crash_at delay deliver
        duplicate load lose_ack lose_commit lose_commit_answer overtake relay try_every_point try_every_point_of_load
    """,
    "txbox_local": "AcceptedMail LocalAws LocalPostgres LocalServerError LocalSmtp",
    "txbox.watermarks": "Advance WAIT_SECONDS Watermarks",
    "txbox.maintenance": "Maintainer MaintenanceReport PlannedTask Retention",
    "txbox.operations.audit": "AuditReport Finding FindingKind Stretch audit audit_inbox",
    "txbox.instrumentation": """
        Audited BrokerLost BrokerRestored BulkLoaded Committed Contended DatabaseLost DatabaseRestored Drained Event
        HeartbeatFailed Hook HorizonRead Maintained Paused PublisherOverdue Received Relayed Resumed Retried
        RunwayRead Settled Stopped emit
    """,
    "txbox.backoff": "Backoff",
    "txbox.relay": """
        AsyncFunctionPublisher AsyncPublisher FunctionPublisher OutboxMessage PartlySent Publisher Refused Relay
    """,
    "txbox_aws.lambda_": "MARGIN_SECONDS async_sqs_handler sqs_handler",
    "txbox_workers.delivery": "Delivery Settlement SettlesInTransaction Source",
    "txbox_aws.envelopes": "Envelope open_envelope",
    "txbox_workers.visibility_heartbeat": "VisibilityHeartbeat",
    "txbox_workers.memory_source": "MemorySource",
    "txbox_workers.brokers": "Broker DatabasePlace GROUP Queue broker_entry broker_of letter_sender load scheme",
    "txbox_testing.conformance.source": "QueueUnderTest SourceConformance",
    "txbox_testing.conformance.publisher": """
        AsyncDestinationUnderTest AsyncPublisherConformance DestinationUnderTest PublisherConformance SendAnswer
    """,
    "txbox_testing.conformance.ledger": "LedgerConformance LedgerStore",
    "txbox_testing.conformance.writer": "LoadUnderTest WriterConformance",
    "txbox_workers.options": "MAX_ATTEMPTS ProcessingOptions WorkerOptions",
    "txbox_workers.worker": "Worker",
    "txbox_workers.postgres": "AsyncPostgresWorker PostgresSource PostgresWorker",
    "txbox_workers.coroutines": """
        AsyncBatchHandler AsyncHandler AsyncProcessingOptions AsyncWorker AsyncWorkerOptions for_functions
    """,
    "txbox_django": "database_engine orm_worker",
    "txbox_django.testing": "EmptiesTxbox empty_txbox",
    "txbox_celery": "MessageParked inbox_task",
    "txbox_spark": """
        ApplyFailed Archive ArchiveReport BatchFailed BulkLoadFailed BulkLoadReport EventSource ExecutorsMissing
        JDBC_DRIVER JobProgress
        LoadPlan Reconciliation RejectedCause RunNotFound SourceError SparkSetupError StatementPlan TooManyRejected
        Upsert archive bulk_load inbox_sink plan_load read_archive read_events read_source reconcile require_jdbc_driver
        require_jdk source_of spark_session
    """,
    "txbox_spark.source": "FORMAT TxboxSource",
    "pyspark_txbox": "DefaultSource",
    "txbox_spark.options": "ABANDONED_SECONDS CHUNK_ROWS LoadOptions",
    "txbox_aws.sqs": """
        AsyncSqsWorker DeadLetterQueue ImportedLetters MessageMove SqsSource SqsWorker create_queue delete_queue
        queue_backlog redrive_to_queue sqs_client
    """,
    "txbox_aws.dynamodb.ledger": "DynamoDBLedger MAX_RESULT_BYTES RETENTION_SECONDS TABLE create_lease_table",
    "txbox_aws.dynamodb.entity": "HIGHEST IDS update_if_newer update_once",
    "txbox.instrumentation.json_logs": "JsonFormatter",
    "txbox.instrumentation.prometheus": "PrometheusHook",
    "txbox.instrumentation.opentelemetry": "OpenTelemetryHook",
    "txbox.tracing": "AttributeValue NO_SPAN NO_TRACING Operation Span Traced Tracing error_type",
    "txbox.instrumentation.opentelemetry_tracing": "OpenTelemetryTracing",
    "txbox_dashboard": "Sensitive dashboard",
    "txbox_http": """
        Answered Idempotency IdempotencyMiddleware InTransaction UnderLease everyone message_id posts_and_patches
    """,
    "txbox.operations.actions": "AUDIT OperatorAction note_action read_actions",
    "txbox.status": """
        ActivitySeries ArchiveStatus BlockedLoad EXACT_UP_TO_ROWS GenerationStatus HandlerConflict HorizonStatus
        InboxBacklog MaintenanceTask Runway RunwayReporter Status SubscriberStatus WorkerStatus find_blocked_loads
        inbox_backlogs read_activity read_runway read_status
    """,
    "txbox.status.exporter.prometheus": "DatabaseCollector",
    "txbox.leases.status": "LeaseStatus LedgerStatus read_lease_status",
    "txbox.outbox.status": """
        COUNTED_MESSAGES DestinationStatus OutboxStatus RelayStatus is_relayed read_backlog read_outbox_status
        relays_at_work with_estimates
    """,
    "txbox.outbox.snapshot_holders": "SnapshotHolder find_snapshot_holders sees_all_sessions without_values",
    "txbox.outbox.sent_messages": "CHUNK_MESSAGES ReplayChunk SentFilter SentMessage SentMessages",
    "txbox.schema": "CreateEarlier DropEarlier TABLE_NAMES Tables VIEW_NAME is_generation is_staging tables",
    "txbox.postgres.sqlstates": """
        CONFLICTS DATABASE_ERRORS DEADLOCK_DETECTED INSUFFICIENT_PRIVILEGE INVALID_CURSOR_NAME LOCK_NOT_AVAILABLE
        OUT_OF_MEMORY PREPARED_REMEDY QUERY_CANCELED READ_ONLY SERIALIZATION_FAILURE TIMED_OUT UNDEFINED_COLUMN
        UNDEFINED_TABLE UNIQUE_VIOLATION
        conflict_relation is_lost_prepared_statement is_of_the_session is_outage is_retryable sqlstate
    """,
    "txbox_migrations": """
        Difference LATEST MigrationError Severity VERSION_TABLE VersionChange current_version downgrade
        downgrade_database find_drift include_object migration_sql upgrade upgrade_database
    """,
}


def test_a_module_offers_these_names_and_no_others() -> None:
    for name, expected in PUBLIC.items():
        module = importlib.import_module(name)
        assert sorted(module.__all__) == expected.split(), name
        assert [public for public in module.__all__ if not hasattr(module, public)] == [], name


def test_annotations_can_be_looked_up() -> None:
    """Since Python 3.14 they are evaluated when they are asked for, so a method ``list`` is taken for the type."""
    for module in map(importlib.import_module, PUBLIC):
        for public in (getattr(module, name) for name in module.__all__):
            for member in [public, *vars(public).values()] if inspect.isclass(public) else [public]:
                function = getattr(member, "fget", getattr(member, "__func__", member))
                if inspect.isclass(function) or inspect.isfunction(function):
                    inspect.get_annotations(function)


def test_what_is_public_is_documented() -> None:
    """Other classes and functions have a docstring where their name does not say it all."""
    bare = [
        f"{name}.{public}{member and '.'}{member}"
        for name in PUBLIC
        if "conformance" not in name  # a test's name is its documentation
        for public in importlib.import_module(name).__all__
        for member, one in _members(getattr(importlib.import_module(name), public))
        if not one.__doc__
    ]
    assert bare == []


def _members(public: object) -> Iterator[tuple[str, object]]:
    if inspect.isclass(public) or inspect.isfunction(public):
        yield "", public
    for name, member in vars(public).items() if inspect.isclass(public) else ():
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            yield name, member


def test_every_module_of_the_reference_is_pinned() -> None:
    pages = {page.stem: page.read_text() for page in (REPOSITORY / "docs" / "reference").glob("*.md")}
    documented = [name for text in pages.values() for name in re.findall(r"^::: ([\w.]+)", text, re.M)]
    assert len(documented) > 20
    assert len(documented) == len(pages.keys() - {"index", "commands"})
    modules = {re.sub(r"\.[A-Z]\w*$", "", name) for name in documented}
    modules = {name if importlib.util.find_spec(name) else name.rpartition(".")[0] for name in modules}
    assert modules - PUBLIC.keys() == set()


def test_no_class_name_stands_for_two_classes() -> None:
    places: dict[str, list[str]] = {}
    for folder in ("inbox", "workers", "spark", "migrations"):
        for file in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and node.name != "Migration":  # which Django looks for in each file
                    places.setdefault(node.name, []).append(str(file.relative_to(REPOSITORY)))
    assert len(places) > 500
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_the_version_is_that_of_the_distribution() -> None:
    assert txbox.__version__ == importlib.metadata.version("txbox")
