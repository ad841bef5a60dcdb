"""The catalogue of mutations: each breaks one guarantee by a small change of one file, and names a test that notices.

``run.py`` applies them one by one and runs their tests. A mutation that survives means that a guarantee has no test.
"""

from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One way to break the code.

    Attributes:
        road: the part of txbox that it breaks.
        breaks: what goes wrong with it, in a phrase.
        file: the source file, relative to the repository.
        text: what it replaces; it occurs exactly once in the file.
        replacement: what it puts there.
        test: the test file or node id that goes red.
    """

    road: str
    breaks: str
    file: str
    text: str
    replacement: str
    test: str

    def apply(self, source: str) -> str:
        """Return the broken source of the file; raises ``ValueError`` unless the text occurs exactly once."""
        count = source.count(self.text)
        if count != 1:
            raise ValueError(f"{self.file} has {count} times, not once: {self.text!r}")
        return source.replace(self.text, self.replacement)


MUTATIONS = (
    # --- inbox -------------------------------------------------------------------------------------------------------
    Mutation(
        "inbox",
        "record takes a duplicate for a new message",
        "inbox/txbox/inbox/inbox.py",
        "if row[0] == 1 or (",
        "if row[0] <= 1 or (",
        "tests/integration/txbox/styles/test_inbox.py::test_a_message_is_first_once",
    ),
    Mutation(
        "inbox",
        "record_many takes the duplicates of a batch for new messages",
        "inbox/txbox/inbox/inbox.py",
        "first = frozenset(ids if row[0] == len(ids) else row[1] or ())",
        "first = frozenset(ids)",
        "tests/integration/txbox/inbox/test_batches.py::test_ids_come_in_any_order_and_in_any_shape",
    ),
    Mutation(
        "inbox",
        "another body under a known id is a duplicate, not a mismatch",
        "inbox/txbox/inbox/inbox.py",
        "kept is not None and bytes(kept) != digests[message_id]",
        'kept is not None and bytes(kept) == b""',
        "tests/integration/txbox/styles/test_inbox.py::test_another_body_is_a_mismatch",
    ),
    Mutation(
        "inbox",
        "a message that another transaction holds is a database error, not in flight",
        "inbox/txbox/inbox/inbox.py",
        "if sqlstate(error) == LOCK_NOT_AVAILABLE:",
        'if sqlstate(error) == "":',
        "tests/integration/txbox/inbox/test_waits.py::test_who_waits_for_somebody_that_does_not_end_gives_up_in_time",
    ),
    Mutation(
        "inbox",
        "record forgets what older generations of a rotating inbox hold",
        "inbox/txbox/inbox/inbox.sql",
        "%(fingerprint)s::bytea FROM bound\n  WHERE NOT EXISTS (",
        "%(fingerprint)s::bytea FROM bound\n  WHERE true OR EXISTS (",
        "tests/integration/txbox/maintenance/test_generations.py::test_an_id_is_a_duplicate_in_every_later_generation",
    ),
    Mutation(
        "inbox",
        "a snapshot from before a rotation lets an id in twice",
        "inbox/txbox/inbox/inbox.py",
        "if (generation := row[-3]) is not None:",
        "if (generation := row[-3]) == 0:",
        "tests/integration/txbox/maintenance/test_generations.py::"
        "test_a_snapshot_from_before_a_rotation_lets_no_id_in_twice",
    ),
    # --- transaction guards ------------------------------------------------------------------------------------------
    Mutation(
        "guards",
        "record works on a connection that commits by itself",
        "inbox/txbox/postgres/transactions.py",
        "    if commits_by_itself(connection):",
        "    if commits_by_itself(connection) is None:",
        "tests/integration/txbox/styles/test_inbox.py::test_what_commits_every_statement_is_refused",
    ),
    Mutation(
        "guards",
        "the server accepts a COMMIT that a handler sends behind SQLAlchemy",
        "inbox/txbox/postgres/guards/commit_guard.py",
        "|| pg_catalog.random())::pg_catalog.int4",
        "|| pg_catalog.random())",
        "tests/integration/txbox_workers/test_handlers.py::"
        "test_a_handler_that_ends_the_transaction_behind_sqlalchemy_loses_nothing",
    ),
    Mutation(
        "guards",
        "a COMMIT behind another statement goes unseen",
        "inbox/txbox/postgres/guards/transaction_guard.py",
        'case "end":',
        'case "never":',
        "tests/unit/txbox/postgres/guards/test_transaction_guard.py",
    ),
    Mutation(
        "guards",
        "a request whose handler swallows the error of a statement is answered as done",
        "workers/txbox_http/in_transaction.py",
        "if connection not in self._guarded:",
        "if connection in self._guarded:",
        "tests/integration/txbox_http/test_applications.py::"
        "test_without_a_key_too_a_swallowed_error_is_not_said_to_be_done_and_a_response_may_be_large",
    ),
    Mutation(
        "guards",
        "a session with two engines updates an entity over the wrong one",
        "inbox/txbox/entities/entity.py",
        'connection_or_session.connection(bind_arguments={"mapper": self._mapper})',
        "connection_or_session.connection()",
        "tests/integration/txbox/entities/test_entity.py::test_a_session_of_several_engines_updates_where_the_entity_is",
    ),
    Mutation(
        "guards",
        "a session with binds works over a connection of its own",
        "inbox/txbox/postgres/guards/session_binds.py",
        "            return target\n",
        "            return chosen\n",
        "tests/integration/txbox_workers/test_sessions_of_hosts.py::"
        "test_of_the_engine_of_the_worker_they_work_in_its_transaction",
    ),
    Mutation(
        "guards",
        "a request without a key has its effect over another engine, and is answered as done",
        "inbox/txbox/postgres/guards/session_binds.py",
        "    bind_to(session, target)\n    return target\n",
        "    return target\n",
        "tests/integration/txbox_http/test_sessions_of_hosts.py::test_of_another_engine_they_are_refused",
    ),
    Mutation(
        "guards",
        "a host's session has its effect over another connection than its message",
        "inbox/txbox/postgres/guards/session_binds.py",
        "if other.connection.dbapi_connection is not written.connection.dbapi_connection:",
        "if other.connection.dbapi_connection is None:",
        "tests/integration/txbox/postgres/test_session_binds.py::test_an_effect_over_another_connection_is_refused",
    ),
    Mutation(
        "guards",
        "a thread that outlives its message has another statement",
        "inbox/txbox/postgres/guards/connection_users.py",
        "if self._ended_by is not None and self._ended_by != _current():",
        "if self._ended_by is None and self._ended_by == _current():",
        "tests/integration/txbox_workers/test_outliving_handlers.py::"
        "test_a_thread_that_comes_between_the_end_and_the_rollback_is_refused",
    ),
    # --- conflicts: deadlocks and serialization failures -------------------------------------------------------------
    Mutation(
        "conflicts",
        "batches insert their ids unsorted, so that they deadlock",
        "inbox/txbox/inbox/inbox.py",
        "ordered = sorted({valid_message_id(message_id) for message_id in ids})",
        "ordered = list(dict.fromkeys(valid_message_id(message_id) for message_id in ids))",
        "tests/integration/txbox/inbox/test_batches.py::test_ids_are_inserted_in_the_order_of_their_bytes",
    ),
    Mutation(
        "conflicts",
        "a serialization failure is not retried",
        "inbox/txbox/postgres/sqlstates.py",
        "return sqlstate(error) in (SERIALIZATION_FAILURE, DEADLOCK_DETECTED)",
        "return sqlstate(error) == DEADLOCK_DETECTED",
        "tests/integration/txbox_workers/processing/test_conflicts.py::"
        "test_a_serialization_failure_is_retried_and_never_read_as_a_duplicate",
    ),
    Mutation(
        "conflicts",
        "a deadlock counts as a failure of its message",
        "workers/txbox_workers/processing/deadlocks.py",
        "return messages == 1 or self.mode in (mode, TransactionMode.BATCH, TransactionMode.SERIAL)",
        "return False",
        "tests/integration/txbox_workers/processing/test_conflicts.py::test_a_deadlock_between_two_handlers_is_retried",
    ),
    Mutation(
        "conflicts",
        "a transaction runs again although its worker is to stop",
        "workers/txbox_workers/processing/deadlocks.py",
        'raise Stopping("not run again, because nothing more is to be begun")',
        "return",
        "tests/integration/txbox_workers/test_stop.py::test_stop_does_not_wait_for_a_pause_between_runs_of_a_transaction",
    ),
    # --- attempts and backoff ----------------------------------------------------------------------------------------
    Mutation(
        "attempts",
        "failures are kept and not counted",
        "inbox/txbox/dead_letters/failures.sql",
        "SET attempts = failure.attempts + 1,",
        "SET attempts = failure.attempts,",
        "tests/integration/txbox/dead_letters/test_failures.py::test_every_failure_counts_and_the_last_error_is_kept",
    ),
    Mutation(
        "attempts",
        "a message that fails for the last time is handed back, not parked",
        "workers/txbox_workers/processing/inbox_processor.py",
        "failed.attempts >= self._max_attempts",
        "failed.attempts > self._max_attempts",
        "tests/integration/txbox_workers/processing/test_attempts.py::"
        "test_hand_backs_do_not_cost_a_message_its_attempts",
    ),
    Mutation(
        "attempts",
        "a message that kills its process comes again for ever",
        "workers/txbox_workers/processing/inbox_processor.py",
        "return self._max_attempts is not None and attempt.number > self._max_attempts",
        "return self._max_attempts is not None and attempt.number < 0",
        "tests/integration/txbox_workers/processing/test_attempts.py::"
        "test_a_message_that_was_delivered_and_never_begun_has_all_of_its_attempts",
    ),
    Mutation(
        "attempts",
        "an attempt that was called off counts",
        "workers/txbox_workers/processing/inbox_processor.py",
        "self._save_later(attempt.message_id, lambda: self._failures.take_back(attempt))",
        "self._save_later(attempt.message_id, lambda: None)",
        "tests/integration/txbox_workers/processing/test_attempts.py::"
        "test_an_attempt_that_was_taken_back_does_not_look_like_a_crash",
    ),
    Mutation(
        "attempts",
        "workers that fail together come back together",
        "inbox/txbox/backoff.py",
        "return longest * random.uniform(0.5, 1.0)",
        "return longest * 0.75",
        "tests/unit/txbox/test_backoff.py::test_workers_that_failed_together_do_not_come_back_together",
    ),
    # --- parking -----------------------------------------------------------------------------------------------------
    Mutation(
        "parking",
        "a letter is kept of a message that is processed meanwhile",
        "inbox/txbox/dead_letters/dead_letters.py",
        "if parked_as != number:",
        "if parked_as == -1:",
        "tests/integration/txbox_workers/processing/test_parking.py::"
        "test_who_parks_waits_for_the_transaction_that_processes_the_message",
    ),
    Mutation(
        "parking",
        "the inbox has a parked message as processed",
        "inbox/txbox/dead_letters/dead_letters.sql",
        "%(fingerprint)s::bytea, %(dead_letter_id)s::bigint",
        "%(fingerprint)s::bytea, nullif(%(dead_letter_id)s::bigint, %(dead_letter_id)s::bigint)",
        "tests/integration/txbox_workers/processing/test_parking.py::"
        "test_what_is_parked_before_the_message_is_recorded_is_not_run",
    ),
    Mutation(
        "parking",
        "a message with another body is dropped, not parked",
        "workers/txbox_workers/processing/inbox_processor.py",
        "settlements.append(self._parker.park_mismatch(delivery))",
        "settlements.append(Settlement(delivery, Outcome.DUPLICATE))",
        "tests/integration/txbox_workers/processing/test_batches.py::"
        "test_the_same_id_with_another_body_is_parked_and_never_run",
    ),
    Mutation(
        "parking",
        "a message that another transaction processes is acked as parked",
        "workers/txbox_workers/processing/parker.py",
        "return in_flight(delivery, error_in_flight)",
        "return Settlement(delivery, Outcome.DEAD, error_in_flight)",
        "tests/integration/txbox_workers/processing/test_parking.py::"
        "test_what_cannot_be_read_is_handed_back_while_its_message_is_processed",
    ),
    # --- redrives and their order ------------------------------------------------------------------------------------
    Mutation(
        "redrive",
        "the copy of a redriven message is refused as parked",
        "inbox/txbox/dead_letters/dead_letters.py",
        "connection.exec_driver_sql(self._statements.unmark_parked, key)",
        "assert key",
        "tests/integration/txbox/dead_letters/test_dead_letters.py::"
        "test_a_letter_that_fails_again_after_its_redrive_is_a_new_one",
    ),
    Mutation(
        "redrive",
        "two redrives at once send a letter twice",
        "inbox/txbox/dead_letters/dead_letters.sql",
        "ORDER BY dead_letter_id FOR UPDATE",
        "ORDER BY dead_letter_id",
        "tests/integration/txbox/dead_letters/test_dead_letters.py::"
        "test_two_redrives_at_once_send_once_whatever_level_the_host_prefers",
    ),
    Mutation(
        "redrive",
        "a letter is redriven before another of its key that waits",
        "inbox/txbox/dead_letters/dead_letters.py",
        "if before is not None:",
        "if before == -1:",
        "tests/integration/txbox_workers/processing/test_order_redrives.py::"
        "test_a_letter_is_not_redriven_before_those_it_waits_for",
    ),
    Mutation(
        "redrive",
        "a redriven message that fails again loses its place in its key",
        "inbox/txbox/dead_letters/order.sql",
        "SELECT min(earlier.order_position) FROM {{dead_letter}} AS earlier",
        "SELECT nullif(max(earlier.order_position), max(earlier.order_position)) FROM {{dead_letter}} AS earlier",
        "tests/integration/txbox_workers/processing/test_order_redrives.py::"
        "test_a_message_that_fails_again_comes_before_those_that_were_behind_it",
    ),
    Mutation(
        "redrive",
        "a resume leaves the letters that have failed",
        "inbox/txbox/dead_letters/dead_letters.sql",
        "WHERE operation_id = %(operation_id)s AND outcome = 'failed'",
        "WHERE operation_id = %(operation_id)s AND outcome = 'gone'",
        "tests/integration/txbox/dead_letters/test_letter_operations.py::"
        "test_a_letter_that_fails_waits_and_is_tried_again_by_a_resume",
    ),
    Mutation(
        "redrive",
        "record takes a copy for parked while it is redriven, where the inbox rotates",
        "inbox/txbox/inbox/inbox.py",
        "or (row[1] and self._record_redriven(connection, row[1], digests))",
        "or (not row and bool(digests))",
        "tests/integration/txbox/dead_letters/test_copies_of_redrives.py::test_it_waits_for_the_redrive",
    ),
    Mutation(
        "redrive",
        "a batch takes a copy for parked while it is redriven, where the inbox rotates",
        "inbox/txbox/inbox/inbox.py",
        "        if row[2]:",
        "        if not row:",
        "tests/integration/txbox/dead_letters/test_copies_of_redrives.py::test_it_waits_for_the_redrive",
    ),
    Mutation(
        "redrive",
        "a recording does not wait for the redrive of a letter of an older generation",
        "inbox/txbox/inbox/inbox.sql",
        "ORDER BY letter.dead_letter_id FOR KEY SHARE OF letter",
        "ORDER BY letter.dead_letter_id",
        "tests/integration/txbox/dead_letters/test_copies_of_redrives.py::"
        "test_a_snapshot_that_is_older_than_the_redrive_does_not_say_parked",
    ),
    Mutation(
        "redrive",
        "who parks a copy does not wait for its redrive, where the inbox rotates",
        "inbox/txbox/dead_letters/dead_letters.py",
        'connection.exec_driver_sql(self._statements.await_redrive, {"dead_letter_id": row.dead_letter_id})',
        "assert key",
        "tests/integration/txbox/dead_letters/test_copies_of_redrives.py::test_a_copy_that_is_to_be_parked_waits_too",
    ),
    # --- outbox ------------------------------------------------------------------------------------------------------
    Mutation(
        "outbox",
        "a message is published under another id than its producer gave",
        "inbox/txbox/outbox/outbox.py",
        "new_message_id() if message.message_id is None else valid_message_id(message.message_id)",
        "new_message_id()",
        "tests/integration/txbox/styles/test_others.py::test_what_is_published_is_in_the_outbox_once_it_has_committed",
    ),
    Mutation(
        "outbox",
        "messages that are published together lose their order",
        "inbox/txbox/outbox/outbox.sql",
        "FROM {{given}}\n  ORDER BY new.number\n",
        "FROM {{given}}\n  ORDER BY new.number DESC\n",
        "tests/integration/txbox/outbox/test_outbox.py::test_many_messages_keep_their_order_and_return_their_ids_in_it",
    ),
    Mutation(
        "outbox",
        "messages to topics lose their order",
        "inbox/txbox/outbox/outbox.sql",
        "IS NULL\n  ORDER BY new.number\n",
        "IS NULL\n  ORDER BY new.number DESC\n",
        "tests/integration/txbox/outbox/test_topics.py::"
        "test_many_messages_may_go_to_topics_and_elsewhere_in_their_order",
    ),
    Mutation(
        "outbox",
        "messages are published beside one to a topic that has no subscribers",
        "inbox/txbox/outbox/outbox.sql",
        "(SELECT destination FROM deserted) IS NULL\n",
        "new.topic IS NULL OR subscribed.topic IS NOT NULL\n",
        "tests/integration/txbox/outbox/test_topics.py::"
        "test_a_topic_that_nobody_has_subscribed_to_is_refused_and_the_transaction_goes_on",
    ),
    Mutation(
        "outbox",
        "a topic's messages for different subscribers are in one lane",
        "inbox/txbox/outbox/outbox.sql",
        "SELECT subscribed.first_lane + %(lane)s",
        "SELECT 0 + %(lane)s",
        "tests/integration/txbox/outbox/test_topics.py::"
        "test_each_subscriber_gets_a_message_once_as_if_it_were_published_to_it",
    ),
    Mutation(
        "outbox",
        "a delay does not delay",
        "inbox/txbox/outbox/outbox.sql",
        "coalesce(clock_timestamp() + %(delay)s::interval, %(due_at)s::timestamptz)",
        "coalesce(clock_timestamp() + %(delay)s::interval * 0, %(due_at)s::timestamptz)",
        "tests/integration/txbox/outbox/test_outbox.py::test_a_delay_is_counted_by_the_databases_clock",
    ),
    Mutation(
        "outbox",
        "a message is published that its destination cannot take",
        "inbox/txbox/outbox/outbox.py",
        "    require_sendable(destination, body, key=key, headers=headers, message_id=message_id)\n    if context",
        "    if context",
        "tests/integration/txbox/outbox/test_outbox.py::test_what_cannot_be_sent_is_refused_when_it_is_published",
    ),
    # --- relay -------------------------------------------------------------------------------------------------------
    Mutation(
        "relay",
        "two relays claim one lane",
        "inbox/txbox/relay/relay.sql",
        "pg_try_advisory_xact_lock({{lock}} # lane)",
        "pg_try_advisory_xact_lock_shared({{lock}} # lane)",
        "tests/integration/txbox/relay/test_round_trips.py::"
        "test_a_batch_of_more_lanes_than_are_free_reads_those_that_are",
    ),
    Mutation(
        "relay",
        "messages of one key are in several lanes",
        "inbox/txbox/outbox/lanes.py",
        "(message_id if key is None else key)",
        "message_id",
        "tests/unit/txbox/outbox/test_lanes.py::test_all_messages_of_a_key_are_in_one_lane",
    ),
    Mutation(
        "relay",
        "a message overtakes one of its key that has failed in the same batch",
        "inbox/txbox/relay/dispatcher.py",
        "self._queues.pop(key, None)",
        "self._queues.get(key)",
        "tests/unit/txbox/relay/test_dispatcher.py::test_a_key_that_is_stopped_hands_out_no_more",
    ),
    Mutation(
        "relay",
        "messages overtake one of their key that was refused",
        "inbox/txbox/relay/settlement.py",
        "holding.add(owner)",
        "holding.discard(owner)",
        "tests/unit/txbox/relay/test_settlement.py::"
        "test_a_refused_message_holds_those_of_its_key_behind_it_and_no_others",
    ),
    Mutation(
        "relay",
        "a transaction that commits late is never sent",
        "inbox/txbox/relay/relay.sql",
        "transaction_id = ANY({{ended_since}}) AND {{ours}} ORDER BY",
        "transaction_id = ANY(({{ended_since}})[1:0]) AND {{ours}} ORDER BY",
        "tests/integration/txbox/relay/test_commit_order.py::test_a_look_finds_exactly_what_has_become_visible",
    ),
    Mutation(
        "relay",
        "a refusal counts twice if its settlement is tried again",
        "inbox/txbox/relay/relay.sql",
        "SET attempts = greatest(m.attempts, refused.attempts),",
        "SET attempts = m.attempts + 1,",
        "tests/integration/txbox/relay/test_settlements.py::test_a_refusal_whose_settlement_is_tried_again_counts_once",
    ),
    Mutation(
        "relay",
        "what a broker that is away was given counts as sent",
        "inbox/txbox/relay/dispatcher.py",
        "result.outage, unsent, failure = error, call.messages, error_type(error)",
        "result.outage, failure = error, error_type(error)",
        "tests/integration/txbox/outbox/test_status.py::test_a_relay_says_where_it_cannot_send_until_it_can",
    ),
    Mutation(
        "relay",
        "nothing wakes an idle relay",
        "inbox/txbox/outbox/notifier.py",
        'cursor.execute(f"NOTIFY {CHANNEL}")',
        "cursor.execute(f\"SELECT '{CHANNEL}'\")",
        "tests/integration/txbox/relay/test_waking.py::test_a_published_message_wakes_an_idle_relay",
    ),
    Mutation(
        "relay",
        "a message that SQS or SNS does not confirm counts as sent",
        "workers/txbox_aws/publishers/calls.py",
        "            result.refused.append(refusal(entry, _UNMENTIONED))\n        elif (difference",
        "            continue\n        elif (difference",
        "tests/unit/txbox_aws/publishers/test_answers.py::test_an_entry_that_is_not_confirmed_is_refused_and_no_other",
    ),
    # --- leases in Postgres ------------------------------------------------------------------------------------------
    Mutation(
        "leases in Postgres",
        "a lease is taken from an owner that holds it",
        "inbox/txbox/leases/leases.sql",
        "AND (lease.expires_at IS NULL OR lease.expires_at <= {{now_at_most}})",
        "AND (true OR lease.expires_at <= {{now_at_most}})",
        "tests/integration/txbox/leases/test_conformance.py::TestLedgers::"
        "test_the_first_one_has_it_and_the_next_one_has_to_wait[postgres]",
    ),
    Mutation(
        "leases in Postgres",
        "an owner whose lease was taken over completes the message",
        "inbox/txbox/leases/leases.sql",
        "AND lease.message_id = %(message_id)s AND lease.fence = %(fence)s",
        "AND lease.message_id = %(message_id)s AND lease.fence >= %(fence)s",
        "tests/integration/txbox/leases/test_conformance.py::TestLedgers::"
        "test_a_lease_that_ran_out_is_taken_over_and_the_late_owner_can_do_nothing[postgres]",
    ),
    Mutation(
        "leases in Postgres",
        "a fence is smaller than the one before it",
        "inbox/txbox/leases/leases.sql",
        "greatest(excluded.fence, lease.fence + 1, "
        "((lease.fence >> 44) << 44) | (excluded.fence & ((1::bigint << 44) - 1)))",
        "excluded.fence",
        "tests/integration/txbox/leases/test_postgres_fences.py::"
        "test_fences_grow_where_the_server_is_behind_what_the_rows_know",
    ),
    Mutation(
        "leases in Postgres",
        "a completed message is done again",
        "inbox/txbox/leases/leases.sql",
        "WHERE lease.completed_at IS NULL\n",
        "WHERE true\n",
        "tests/integration/txbox/leases/test_conformance.py::TestLedgers::"
        "test_what_is_completed_stays_completed_with_its_result[postgres]",
    ),
    Mutation(
        "leases in Postgres",
        "the lease of a slow handler is not renewed in time",
        "inbox/txbox/leases/renewer.py",
        "RENEWED_AFTER = 1 / 3",
        "RENEWED_AFTER = 5 / 1",
        "tests/integration/txbox/leases/test_renewer.py::"
        "test_a_handler_slower_than_its_lease_runs_once_and_keeps_others_out",
    ),
    # --- leases in DynamoDB ------------------------------------------------------------------------------------------
    Mutation(
        "leases in DynamoDB",
        "a lease is taken over while the clocks of the hosts differ",
        "workers/txbox_aws/dynamodb/ledger.py",
        '"over": _milliseconds(earliest - SKEW_SECONDS),',
        '"over": _milliseconds(earliest),',
        "tests/integration/txbox_aws/dynamodb/test_ledger_clock.py::"
        "test_a_host_whose_clock_is_ahead_within_the_skew_changes_nothing",
    ),
    Mutation(
        "leases in DynamoDB",
        "an owner whose lease was taken over completes the message",
        "workers/txbox_aws/dynamodb/ledger.py",
        '"#fence = :fence AND attribute_exists(#expires_at)",',
        '"#fence >= :fence AND attribute_exists(#expires_at)",',
        "tests/integration/txbox/leases/test_conformance.py::TestLedgers::"
        "test_a_lease_that_ran_out_is_taken_over_and_the_late_owner_can_do_nothing[dynamodb]",
    ),
    Mutation(
        "leases in DynamoDB",
        "a renewal that arrives late undoes a later one",
        "workers/txbox_aws/dynamodb/ledger.py",
        " AND #asked_at < :asked_at",
        "",
        "tests/integration/txbox_aws/dynamodb/test_lost_answers.py::"
        "test_a_renewal_that_comes_late_does_not_undo_a_later_one",
    ),
    Mutation(
        "leases in DynamoDB",
        "an acquisition that is repeated late takes the lease anew",
        "workers/txbox_aws/dynamodb/ledger.py",
        '"AND (attribute_not_exists(#mark) OR #mark <> :mark)"',
        '""',
        "tests/integration/txbox_aws/dynamodb/test_lost_answers.py::test_an_acquisition_that_comes_again_late_takes_nothing",
    ),
    # --- idempotent functions and workers with a ledger --------------------------------------------------------------
    Mutation(
        "ledger",
        "a function that is done runs again",
        "inbox/txbox/leases/runner.py",
        "yield from self._complete(lease, encoded, until)",
        "yield from ()",
        "tests/integration/txbox/leases/idempotency/test_handlers.py::"
        "test_a_handler_of_any_kind_runs_once_and_its_result_is_kept",
    ),
    Mutation(
        "ledger",
        "a message stays locked after its handler has failed",
        "inbox/txbox/leases/runner.py",
        "yield from self._release(lease, release)",
        "yield from ()",
        "tests/integration/txbox/leases/idempotency/test_handler_failures.py::"
        "test_a_handler_that_fails_leaves_the_message_free_and_its_error_goes_on",
    ),
    Mutation(
        "ledger",
        "a function runs for another payload under the same id",
        "inbox/txbox/leases/idempotency.py",
        "return message_id, sha256(payload)",
        "return message_id, sha256(payload)[:0] or None",
        "tests/integration/txbox/leases/idempotency/test_handlers.py::"
        "test_another_payload_under_the_same_id_is_refused",
    ),
    Mutation(
        "ledger",
        "a worker that has lost its lease parks the message",
        "workers/txbox_workers/processing/ledger_processor.py",
        "self._ledger.renew(lease)",
        "assert lease",
        "tests/integration/txbox_workers/leases/test_ledger_dead_letters.py::test_who_has_lost_the_lease_parks_nothing",
    ),
    # --- watermarks --------------------------------------------------------------------------------------------------
    Mutation(
        "watermarks",
        "who has waited for a later event sets the watermark back",
        "inbox/txbox/watermarks/watermarks.sql",
        "WHERE mark.sequence < excluded.sequence",
        "WHERE mark.sequence <> excluded.sequence",
        "tests/integration/txbox/watermarks/test_races.py::"
        "test_who_waits_for_a_commit_is_judged_by_it_at_read_committed",
    ),
    Mutation(
        "watermarks",
        "who insists on each event skips one",
        "inbox/txbox/watermarks/watermarks.sql",
        "WHERE mark.sequence = %(sequence)s::bigint - 1",
        "WHERE mark.sequence < %(sequence)s::bigint",
        "tests/integration/txbox/watermarks/test_watermark.py::test_a_batch_is_answered_as_its_events_one_by_one",
    ),
    Mutation(
        "watermarks",
        "a batch applies an event twice",
        "inbox/txbox/watermarks/watermarks.py",
        "if seen is not None and sequence <= seen:",
        "if seen is not None and sequence < seen:",
        "tests/unit/txbox/watermarks/test_watermark.py::test_an_event_above_the_watermark_is_applied",
    ),
    Mutation(
        "watermarks",
        "batches lock watermarks in an order of their own, so that they deadlock with loads",
        "inbox/txbox/watermarks/watermarks.sql",
        'ORDER BY wanted.aggregate_type COLLATE "C", wanted.aggregate_id COLLATE "C"',
        "ORDER BY md5(wanted.aggregate_id)",
        "tests/integration/txbox/watermarks/test_watermark.py::test_rows_are_locked_in_the_order_of_their_bytes",
    ),
    # --- entities ----------------------------------------------------------------------------------------------------
    Mutation(
        "entities",
        "an entity applies a duplicate",
        "inbox/txbox/entities/entity.py",
        "row.update(connection_or_session, values, ids, ~duplicate,",
        "row.update(connection_or_session, values, ids, true(),",
        "tests/integration/txbox/entities/test_entity.py::test_the_first_time_is_applied_and_every_other_time_is_not",
    ),
    Mutation(
        "entities",
        "an entity applies an event that a later one has overtaken",
        "inbox/txbox/entities/entity.py",
        "cast(highest_text, Numeric) < identifier",
        "cast(highest_text, Numeric) != identifier",
        "tests/integration/txbox/entities/test_entity.py::test_what_is_not_higher_than_all_before_is_dropped",
    ),
    Mutation(
        "entities",
        "a row that appears meanwhile is taken for a duplicate",
        "inbox/txbox/entities/entity.py",
        "            if found[0] is not None:\n                return found[0]",
        "            return True",
        "tests/integration/txbox/entities/test_races.py::test_a_row_that_comes_while_it_is_looked_for_is_no_duplicate",
    ),
    Mutation(
        "entities",
        "an item in DynamoDB applies a duplicate",
        "workers/txbox_aws/dynamodb/entity.py",
        "AND NOT contains(#txbox_memory, :txbox_id)",
        "OR contains(#txbox_memory, :txbox_id)",
        "tests/integration/txbox_aws/dynamodb/test_entity.py::test_the_first_time_is_applied_and_every_other_time_is_not",
    ),
    # --- visibility heartbeat ----------------------------------------------------------------------------------------
    Mutation(
        "heartbeat",
        "a delivery is extended after its visibility has ended",
        "workers/txbox_workers/visibility_heartbeat.py",
        "due = received_at + seconds / 2",
        "due = received_at + seconds * 2",
        "tests/unit/txbox_workers/test_visibility_heartbeat.py::test_a_delivery_is_extended_at_half_time_and_not_before",
    ),
    Mutation(
        "heartbeat",
        "an extension that has failed is not repeated in time",
        "workers/txbox_workers/visibility_heartbeat.py",
        "next_due = time.monotonic() + min(_RETRY_SECONDS, seconds / 10)",
        "next_due = time.monotonic() + seconds",
        "tests/unit/txbox_workers/test_visibility_heartbeat.py::"
        "test_a_call_that_failed_is_reported_and_tried_again_long_before_the_time_is_over",
    ),
    Mutation(
        "heartbeat",
        "a delivery that is settled is extended for ever",
        "workers/txbox_workers/visibility_heartbeat.py",
        "self._watched.pop(delivery.receipt, None)",
        "self._watched.get(delivery.receipt)",
        "tests/unit/txbox_workers/test_visibility_heartbeat.py::test_a_delivery_that_was_forgotten_is_left_alone",
    ),
    # --- SQS ---------------------------------------------------------------------------------------------------------
    Mutation(
        "SQS",
        "a delete that SQS did not confirm counts as done",
        "workers/txbox_aws/sqs/source.py",
        "[delivery.receipt for delivery in deliveries if delivery.receipt not in unconfirmed]",
        "[delivery.receipt for delivery in deliveries if unconfirmed is not None]",
        "tests/unit/txbox_aws/sqs/test_batch_calls.py::"
        "test_an_entry_that_is_missing_from_the_answer_is_not_taken_as_done",
    ),
    Mutation(
        "SQS",
        "deliveries are handed back without their delays",
        "workers/txbox_aws/sqs/source.py",
        "{settlement.delivery.receipt: settlement.delay_seconds for settlement in settlements}",
        "{settlement.delivery.receipt: 0.0 for settlement in settlements}",
        "tests/unit/txbox_aws/sqs/test_batch_calls.py::"
        "test_each_delivery_is_handed_back_with_its_own_delay_in_whole_seconds",
    ),
    Mutation(
        "SQS",
        "an extension beyond twelve hours is asked for, and refused",
        "workers/txbox_aws/sqs/source.py",
        "math.floor(min(seconds, left))",
        "math.floor(seconds)",
        "tests/unit/txbox_aws/sqs/test_source.py::test_extensions_end_at_the_twelve_hours_that_sqs_allows",
    ),
    Mutation(
        "SQS",
        "a worker acks a message that has failed",
        "workers/txbox_workers/polling/settler.py",
        "to_ack = [settlement.delivery for settlement in settlements if settlement.outcome.acked]",
        "to_ack = [settlement.delivery for settlement in settlements]",
        "tests/integration/txbox_aws/test_sqs_worker.py::"
        "test_groups_keep_their_order_over_failures_retries_and_dead_letters",
    ),
    # --- Lambda ------------------------------------------------------------------------------------------------------
    Mutation(
        "Lambda",
        "Lambda deletes a message that has failed",
        "workers/txbox_aws/lambda_/handler.py",
        "            if not settlement.outcome.acked:\n                failed.append",
        "            if settlement.outcome is Outcome.IN_FLIGHT:\n                failed.append",
        "tests/integration/txbox_aws/lambda_/test_answers.py::test_only_what_has_failed_comes_again",
    ),
    Mutation(
        "Lambda",
        "Lambda deletes what has no outcome, as the database is gone",
        "workers/txbox_aws/lambda_/handler.py",
        "or Settlement(delivery, Outcome.IN_FLIGHT, trouble)",
        "or Settlement(delivery, Outcome.DUPLICATE, trouble)",
        "tests/integration/txbox_aws/lambda_/test_connections.py::"
        "test_when_the_database_goes_in_the_middle_the_outcomes_before_it_stand",
    ),
    Mutation(
        "Lambda",
        "a handler begins that cannot end in time",
        "workers/txbox_aws/lambda_/deadline.py",
        "self._expected_seconds if self._has_run else 0.0",
        "0.0 if self._has_run else 0.0",
        "tests/unit/txbox_aws/lambda_/test_handler.py::test_a_handler_is_begun_only_if_one_like_those_before_fits",
    ),
    Mutation(
        "Lambda",
        "messages of a FIFO queue overtake one that has failed",
        "workers/txbox_aws/lambda_/event_source.py",
        'if source.endswith(".fifo"):',
        'if source.endswith(".fifo."):',
        "tests/integration/txbox_aws/lambda_/test_answers.py::test_fifo_stops_at_the_first_failure",
    ),
    # --- ordered processing ------------------------------------------------------------------------------------------
    Mutation(
        "order",
        "messages overtake one of their group that has failed",
        "workers/txbox_workers/processing/processor.py",
        "if self._stopping.is_set() or delay is not None:",
        "if self._stopping.is_set():",
        "tests/integration/txbox_workers/processing/test_groups.py::"
        "test_what_follows_a_failure_in_its_group_is_handed_back",
    ),
    Mutation(
        "order",
        "messages run although a dead letter holds their key",
        "inbox/txbox/dead_letters/order.py",
        "        if not heads:\n            return",
        "        if heads is not None:\n            return",
        "tests/integration/txbox_workers/processing/test_order.py::"
        "test_what_follows_a_dead_letter_in_its_key_is_parked_behind_it_in_order",
    ),
    Mutation(
        "order",
        "a letter that was discarded holds its key for ever",
        "inbox/txbox/dead_letters/order.sql",
        "letter.order_position IS NOT NULL AND letter.discarded_at IS NULL AND NOT EXISTS (",
        "letter.order_position IS NOT NULL AND NOT EXISTS (",
        "tests/integration/txbox_workers/processing/test_order_redrives.py::"
        "test_what_is_discarded_holds_nothing_and_the_next_one_may_go",
    ),
    # --- coroutines --------------------------------------------------------------------------------------------------
    Mutation(
        "coroutines",
        "an inbox for coroutines does not judge the age of a batch",
        "inbox/txbox/coroutines.py",
        "self.sync_inbox.record_many, ids, sent_at=sent_at)",
        "self.sync_inbox.record_many, ids)",
        "tests/integration/txbox/styles/test_inbox.py::test_what_is_too_old_to_judge_is_expired",
    ),
    Mutation(
        "coroutines",
        "a handler that was cancelled counts as failed",
        "workers/txbox_workers/processing/outage_errors.py",
        "return is_cancelled() and any(",
        "return error is None and any(",
        "tests/integration/txbox_workers/coroutines/test_cancellation.py::"
        "test_a_run_is_cancelled_at_each_await_of_a_batch[ledger]",
    ),
    Mutation(
        "coroutines",
        "a worker for coroutines takes a function, which blocks its event loop",
        "workers/txbox_workers/coroutines/options.py",
        "if not is_coroutine_function(handler):",
        "if not callable(handler):",
        "tests/integration/txbox_workers/coroutines/test_handlers.py::test_what_cannot_work_is_refused_when_it_is_made",
    ),
    # --- HTTP --------------------------------------------------------------------------------------------------------
    Mutation(
        "HTTP",
        "a repeat does not get the first answer",
        "workers/txbox_http/in_transaction.py",
        "strength.keep(session, keyed, answer)",
        "assert strength and keyed",
        "tests/integration/txbox_http/test_in_transaction.py::"
        "test_a_repeat_gets_status_headers_and_body_of_the_first_answer",
    ),
    Mutation(
        "HTTP",
        "another request under a known key gets the first answer",
        "workers/txbox_http/in_transaction.py",
        "if bytes(fingerprint) != keyed.fingerprint:",
        'if bytes(fingerprint) == b"":',
        "tests/integration/txbox_http/test_in_transaction.py::test_what_is_answered_to_requests_that_are_not_run",
    ),
    Mutation(
        "HTTP",
        "a client hears of an effect before it has committed",
        "workers/txbox_http/exchange.py",
        "        await work.finish(answer, done=self._keeps(answer.status))\n        await self.answer(answer)",
        "        await self.answer(answer)\n        await work.finish(answer, done=self._keeps(answer.status))",
        "tests/integration/txbox_http/test_applications.py::test_what_fails_at_the_commit_is_not_said_to_be_done",
    ),
    Mutation(
        "HTTP",
        "callers share their keys and answers",
        "workers/txbox_http/keys.py",
        "return key if caller is None else f\"{quote(caller, safe='')} {key}\"",
        "return key",
        "tests/unit/txbox_http/test_keys.py::test_callers_and_keys_make_different_ids",
    ),
    # --- Celery ------------------------------------------------------------------------------------------------------
    Mutation(
        "Celery",
        "a task is retried whose message must not run",
        "workers/txbox_celery/inbox_task.py",
        "NOT_RETRIED = (Expired, InvalidMessageId, MessageParked, Mismatch, Reject)",
        "NOT_RETRIED = (Reject,)",
        "tests/integration/txbox_celery/test_inbox_task.py::test_what_is_not_to_be_run_fails_and_is_not_retried",
    ),
    Mutation(
        "Celery",
        "a body that runs again gets the arguments that its first run has changed",
        "workers/txbox_celery/inbox_task.py",
        "args, kwargs = copy.deepcopy((call.args, call.kwargs))",
        "args, kwargs = call.args, call.kwargs",
        "tests/integration/txbox_celery/test_inbox_task.py::"
        "test_a_body_that_runs_again_has_the_arguments_as_they_were_sent",
    ),
    Mutation(
        "Celery",
        "a task may be acked before its commit",
        "workers/txbox_celery/inbox_task.py",
        'for name in ("acks_late", "reject_on_worker_lost"):',
        'for name in ("reject_on_worker_lost",):',
        "tests/integration/txbox_celery/test_inbox_task.py::test_an_ack_before_the_commit_is_refused",
    ),
    Mutation(
        "Celery",
        "a retry that cannot be sent is lost",
        "workers/txbox_celery/inbox_task.py",
        "raise Reject(unsent.reason, requeue=True) from unsent",
        "raise Reject(unsent.reason, requeue=False) from unsent",
        "tests/integration/txbox_celery/test_inbox_task.py::test_a_retry_that_cannot_be_sent_goes_back_to_the_broker",
    ),
    # --- Django ------------------------------------------------------------------------------------------------------
    Mutation(
        "Django",
        "a handler loses its effects and its message is acked",
        "workers/txbox_django/worker.py",
        "if wrapper.needs_rollback:",
        "if wrapper is None:",
        "tests/integration/txbox_django/test_workers.py::"
        "test_no_handler_can_end_the_transaction_or_lose_its_effects_in_silence",
    ),
    Mutation(
        "Django",
        "on_commit is called for a transaction that was rolled back",
        "workers/txbox_django/worker.py",
        "if not event.first:  # no handler has run",
        "if event.first < 0:  # no handler has run",
        "tests/integration/txbox_django/test_workers.py::"
        "test_callbacks_of_what_was_rolled_back_do_not_wait_for_another_commit",
    ),
    Mutation(
        "Django",
        "a thread does not get its own connection back",
        "workers/txbox_django/engine.py",
        "connections[using] = own",
        "assert own",
        "tests/integration/txbox_django/test_workers.py::test_django_s_own_connection_of_the_thread_is_as_it_was",
    ),
    # --- Spark -------------------------------------------------------------------------------------------------------
    Mutation(
        "Spark",
        "a chunk applies what a live worker has processed meanwhile",
        "spark/txbox_spark/merging/chunk_merger.sql",
        "WHERE NOT EXISTS (SELECT FROM pg_temp.txbox_recorded",
        "WHERE false AND NOT EXISTS (SELECT FROM pg_temp.txbox_recorded",
        "tests/integration/txbox_spark/merging/test_chunk_merger.py::test_a_live_worker_is_faster_with_some[staged]",
    ),
    Mutation(
        "Spark",
        "a chunk that is merged is merged again",
        "spark/txbox_spark/merging/chunk_merger.py",
        "connection.exec_driver_sql(plan.sql.claim_chunk, claim).rowcount == 1",
        "connection.exec_driver_sql(plan.sql.claim_chunk, claim).rowcount >= 0",
        "tests/integration/txbox_spark/merging/test_chunk_merger.py::test_alone[staged]",
    ),
    Mutation(
        "Spark",
        "fresh_event has an event twice that is twice in the source",
        "spark/txbox_spark/merging/chunk_stream.py",
        "pyarrow.array([first != self._last]), compute.greater(following, before)",
        "pyarrow.array([first != self._last]), compute.greater_equal(following, before)",
        "tests/unit/txbox_spark/merging/test_chunk_stream.py::test_one_event_of_each_id",
    ),
    Mutation(
        "Spark",
        "two chunks of a subscriber apply their events at once",
        "spark/txbox_spark/merging/chunk_merger.sql",
        "SELECT pg_advisory_xact_lock({{effects_lock}})",
        "SELECT pg_advisory_xact_lock_shared({{effects_lock}})",
        "tests/integration/txbox_spark/merging/test_merge_limits.py::"
        "test_a_chunk_whose_executor_is_frozen_is_ended_and_the_next_one_goes_on",
    ),
    Mutation(
        "Spark",
        "the ledger counts what a lost attempt at a task has merged",
        "spark/txbox_spark/source/run_ledger.sql",
        "AND chunk <> ALL(%(pieces)s) RETURNING applied",
        "AND chunk = ALL(%(pieces)s) RETURNING applied",
        "tests/integration/txbox_spark/source/test_piece_merger.py::test_what_a_lost_attempt_has_applied_counts_once",
    ),
    Mutation(
        "Spark",
        "a text that Postgres cannot keep ends the load, and is not rejected",
        "spark/txbox_spark/source/arrow_events.py",
        'reasons.add("NUL character, which Postgres cannot keep", holds_nul, one.column.name)',
        "assert holds_nul is not None",
        "tests/integration/txbox_spark/source/test_piece_merger.py::test_texts_that_postgres_cannot_keep_are_rejected",
    ),
    # --- migrations --------------------------------------------------------------------------------------------------
    Mutation(
        "migrations",
        "a step makes another table than the metadata say",
        "migrations/txbox_migrations/steps/step_010_baseline.py",
        'BYTEWISE = Text(collation="C")',
        "BYTEWISE = Text()",
        "tests/migrations/test_steps.py::test_upgraded_database_has_no_drift",
    ),
    Mutation(
        "migrations",
        "a downgrade leaves staging tables behind",
        "migrations/txbox_migrations/steps/step_010_baseline.py",
        "EXECUTE 'DROP TABLE ' || staging;",
        "CONTINUE;",
        "tests/migrations/test_steps.py::test_staging_tables_go_with_the_ledger_and_those_of_another_place_stay",
    ),
    Mutation(
        "migrations",
        "tables of a newer release are changed",
        "migrations/txbox_migrations/version_mark.py",
        "if version > LATEST:",
        "if version < 0:",
        "tests/migrations/test_steps.py::test_tables_of_a_newer_release_are_refused",
    ),
    Mutation(
        "migrations",
        "the drift check does not see a changed column",
        "migrations/txbox_migrations/drift.py",
        "if found[part][key] != value:",
        'if key == "definition" and found[part][key] != value:',
        "tests/migrations/test_drift.py::test_a_change_is_found_and_nothing_else",
    ),
    # --- maintenance: retention and horizon --------------------------------------------------------------------------
    Mutation(
        "maintenance",
        "a message that was forgotten runs again",
        "inbox/txbox/inbox/age_judge.py",
        "elif at < old_before:",
        "elif at < _EPOCH:",
        "tests/integration/txbox/inbox/test_horizon.py::test_an_id_that_was_forgotten_and_comes_again_is_expired",
    ),
    Mutation(
        "maintenance",
        "ids go before every transaction can see the horizon",
        "inbox/txbox/maintenance/sweeper.sql",
        "horizon.horizon, to_timestamp(given.settled),",
        "horizon.horizon,",
        "tests/integration/txbox/maintenance/test_races.py::test_nothing_goes_before_every_transaction_can_see_the_horizon",
    ),
    Mutation(
        "maintenance",
        "a generation goes by a horizon that a running transaction may not see",
        "inbox/txbox/maintenance/rotation/generations.sql",
        "OR least(reached.horizon,",
        "OR greatest(reached.horizon,",
        "tests/integration/txbox/maintenance/test_generations.py::test_a_horizon_that_a_running_transaction_may_not_see_forgets_nothing",
    ),
    Mutation(
        "maintenance",
        "a horizon moves back",
        "inbox/txbox/maintenance/maintenance.sql",
        "WHERE excluded.horizon - moved.horizon >= least(",
        "WHERE moved.horizon - excluded.horizon <> least(",
        "tests/integration/txbox/maintenance/test_maintainer.py::test_a_horizon_never_moves_back_and_has_few_versions",
    ),
    Mutation(
        "maintenance",
        "the row of a letter that waits is forgotten",
        "inbox/txbox/maintenance/sweeper.sql",
        "SELECT letter.redriven_at IS NULL AND coalesce(letter.discarded_at >= cuts.before, true)",
        "SELECT letter.redriven_at IS NULL AND coalesce(letter.discarded_at >= cuts.before, false)",
        "tests/integration/txbox/maintenance/test_maintainer.py::"
        "test_the_row_of_a_letter_that_waits_stays_and_goes_once_it_is_discarded",
    ),
    Mutation(
        "maintenance",
        "two maintainers work at once",
        "inbox/txbox/maintenance/maintenance.sql",
        "WHERE lease.owner = excluded.owner OR lease.expires_at IS NULL",
        "WHERE true OR lease.expires_at IS NULL",
        "tests/integration/txbox/maintenance/test_races.py::"
        "test_one_that_was_frozen_between_two_transactions_does_nothing_more",
    ),
    Mutation(
        "maintenance",
        "ids are forgotten that a queue may still deliver",
        "inbox/txbox/maintenance/horizons.py",
        "if window < kept:",
        "if window < timedelta(0):",
        "tests/integration/txbox/maintenance/test_windows.py::"
        "test_a_window_shorter_than_a_queue_may_keep_its_messages_is_refused",
    ),
    # --- audit -------------------------------------------------------------------------------------------------------
    Mutation(
        "audit",
        "an audit does not name what is missing",
        "inbox/txbox/operations/audit/auditor.py",
        "missing[message_id] = FindingKind(state)",
        "continue",
        "tests/integration/txbox/operations/audit/test_faults.py::test_what_is_planted_is_named_and_nothing_else",
    ),
    Mutation(
        "audit",
        "an audit calls missing what is on its way",
        "inbox/txbox/operations/audit/auditor.py",
        "if lost and sent_at[message_id] > self._sent_before:",
        "if not lost and sent_at[message_id] > self._sent_before:",
        "tests/integration/txbox/operations/audit/test_faults.py::test_what_is_on_its_way_is_not_missing",
    ),
    Mutation(
        "audit",
        "an audit takes a failure of last week for a retry",
        "inbox/txbox/operations/audit/audit.sql",
        "tried.at > greatest(limits.in_flight_since - %(retry)s::interval, limits.kept_since)",
        "tried.at > least(limits.in_flight_since - %(retry)s::interval, limits.kept_since)",
        "tests/integration/txbox/operations/audit/test_faults.py::test_what_is_on_its_way_is_not_missing",
    ),
    Mutation(
        "audit",
        "an audit overlooks a letter that the inbox does not know",
        "inbox/txbox/operations/audit/audit.sql",
        "ELSE 'unrecorded'",
        "ELSE NULL",
        "tests/integration/txbox/operations/audit/test_faults.py::test_an_inbox_is_balanced_by_itself",
    ),
    Mutation(
        "audit",
        "an audit may write",
        "inbox/txbox/operations/audit/audit.sql",
        "set_config('transaction_read_only', 'on', true)",
        "set_config('transaction_read_only', 'off', true)",
        "tests/integration/txbox/operations/audit/test_faults.py::test_it_only_reads",
    ),
    # --- status ------------------------------------------------------------------------------------------------------
    Mutation(
        "status",
        "the status counts parked messages as processed",
        "inbox/txbox/status/status.sql",
        "count(*) FILTER (WHERE dead_letter_id IS NULL),",
        "count(*),",
        "tests/integration/txbox/test_status.py::test_each_subscriber_that_left_a_trace_has_a_line",
    ),
    Mutation(
        "status",
        "the status counts a message as failing that was processed since",
        "inbox/txbox/status/status.sql",
        "WHERE processed.subscriber_id = failure.subscriber_id AND processed.message_id = failure.message_id",
        "WHERE processed.subscriber_id = failure.subscriber_id AND processed.message_id <> failure.message_id",
        "tests/integration/txbox/test_status.py::test_a_failure_that_a_resend_has_brought_home_is_not_retrying",
    ),
    Mutation(
        "status",
        "the status does not see that the maintainer is gone",
        "inbox/txbox/status/runway.py",
        "overdue=seconds_ago is not None and seconds_ago > OVERDUE_SECONDS,",
        "overdue=seconds_ago is None,",
        "tests/integration/txbox/maintenance/test_runway.py::test_a_maintainer_that_does_not_run_shows_within_minutes",
    ),
    Mutation(
        "status",
        "the status shows a relay that was killed as at work",
        "inbox/txbox/outbox/status.sql",
        "session.pid = reported.backend_pid)",
        "session.pid <> reported.backend_pid)",
        "tests/integration/txbox/outbox/test_status.py::"
        "test_a_relay_that_was_killed_is_stale_and_its_rate_does_not_count",
    ),
    # --- dashboard ---------------------------------------------------------------------------------------------------
    Mutation(
        "dashboard",
        "a forged form acts",
        "workers/txbox_dashboard/app.py",
        "if not is_same_site(http.headers) or not secrets.compare_digest(",
        "if not is_same_site(http.headers) and not secrets.compare_digest(",
        "tests/integration/txbox_dashboard/test_letters.py::test_a_form_that_is_not_of_this_session_changes_nothing",
    ),
    Mutation(
        "dashboard",
        "an action is not on record",
        "workers/txbox_dashboard/actions.py",
        "note_action(connection, action, target, by=self.who, detail=given, **place)",
        "assert connection and given and place",
        "tests/integration/txbox_dashboard/test_letters.py::test_a_pause_is_heeded_and_on_record",
    ),
    Mutation(
        "dashboard",
        "a discard takes letters that were parked after the count",
        "inbox/txbox/dead_letters/dead_letters.sql",
        "AND (%(up_to)s::bigint IS NULL OR letter.dead_letter_id <= %(up_to)s)",
        "AND (%(up_to)s::bigint IS NULL OR true)",
        "tests/integration/txbox_dashboard/test_letters.py::test_what_is_parked_after_the_count_is_not_discarded",
    ),
    Mutation(
        "dashboard",
        "a dashboard that only reads acts",
        "workers/txbox_dashboard/app.py",
        "if not self._settings.allow_actions:",
        "if self._settings.allow_actions is None:",
        "tests/integration/txbox_dashboard/test_letters.py::test_a_dashboard_that_only_reads_refuses_every_action",
    ),
    Mutation(
        "dashboard",
        "a text is shown that could not be redacted",
        "workers/txbox_dashboard/redaction.py",
        'return f"(not shown: redact raised {type(error).__name__})"',
        "assert error",
        "tests/integration/txbox_dashboard/test_letters.py::"
        "test_a_letter_is_shown_without_its_body_unless_asked_and_then_redacted",
    ),
    Mutation(
        "dashboard",
        "a cookie that was changed is a session",
        "workers/txbox_dashboard/access.py",
        "if not hmac.compare_digest(signature, self._signature(text)):",
        "if not signature:",
        "tests/unit/txbox_dashboard/test_access.py::test_a_changed_cookie_is_no_session",
    ),
    # --- command line ------------------------------------------------------------------------------------------------
    Mutation(
        "CLI",
        "wrong usage ends with status 1",
        "workers/txbox_cli/app.py",
        "2 if isinstance(error, UsageError) else 1",
        "1",
        "tests/unit/txbox_cli/test_app.py::test_asked_wrongly_is_one_line_and_status_2",
    ),
    Mutation(
        "CLI",
        "an audit that finds something ends with status 0",
        "workers/txbox_cli/commands/audit.py",
        "balanced = all(report.balanced for report in reports) and (",
        "balanced = bool(reports) and (",
        "tests/integration/txbox_cli/test_audit_command.py::test_what_is_missing_is_named_and_the_status_is_1",
    ),
    Mutation(
        "CLI",
        "an error shows a password",
        "workers/txbox_cli/errors.py",
        'return _PASSWORD_IN_QUERY.sub(r"\\1***", _WORD.sub(_mask_url, text))',
        "return _WORD.sub(_mask_url, text)",
        "tests/unit/txbox_cli/test_errors.py::test_passwords_are_masked",
    ),
    Mutation(
        "CLI",
        "a log line shows a password",
        "workers/txbox_cli/app.py",
        "return printable(mask(super().format(record)), keep",
        "return printable(super().format(record), keep",
        "tests/unit/txbox_cli/test_errors.py::test_log_lines_are_masked_with_their_tracebacks",
    ),
    Mutation(
        "CLI",
        "a message id steers the terminal",
        "workers/txbox_cli/output.py",
        "character if character.isprintable() or character in keep else ascii(character)[1:-1]",
        "character",
        "tests/unit/txbox_cli/test_output.py::test_what_would_steer_a_terminal_is_escaped",
    ),
    # --- instrumentation ---------------------------------------------------------------------------------------------
    Mutation(
        "instrumentation",
        "a hook that raises ends the work",
        "inbox/txbox/instrumentation/events.py",
        "if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():",
        "if isinstance(error, Exception):",
        "tests/unit/txbox/instrumentation/test_events.py::test_what_a_hook_raises_is_logged_and_goes_no_further",
    ),
    Mutation(
        "instrumentation",
        "the log shows the values of a statement that has failed",
        "inbox/txbox/instrumentation/logs.py",
        'original = getattr(error, "orig", None)',
        "original = None",
        "tests/unit/txbox/instrumentation/test_logs.py::"
        "test_a_database_error_is_one_line_without_the_values_of_its_statement",
    ),
    Mutation(
        "instrumentation",
        "an ack that the broker did not confirm is not counted",
        "inbox/txbox/instrumentation/metrics.py",
        "if event.outcome.acked and not event.acked:",
        "if event.acked and not event.outcome.acked:",
        "tests/unit/txbox/instrumentation/test_exporters.py::test_a_story_is_counted",
    ),
    Mutation(
        "instrumentation",
        "JSON logs show a password",
        "inbox/txbox/instrumentation/json_logs.py",
        'return self._mask(value).encode("utf-8", "replace").decode()',
        'return value.encode("utf-8", "replace").decode()',
        "tests/unit/txbox/instrumentation/test_json_logs.py::test_secrets_are_masked_in_messages_tracebacks_and_extras",
    ),
)
