"""Which tests of a ``Worker`` are tests of an ``AsyncWorker``, too; see ``support.workers.coroutine_worker``."""

BOTH_KINDS = {
    "processing.test_attempts",
    "processing.test_batches",
    "processing.test_conflicts",
    "processing.test_cut_off",
    "processing.test_effects",
    "processing.test_expired",
    "processing.test_order",
    "processing.test_outages",
    "processing.test_parking",
    "leases.test_expired",
    "leases.test_ledger_beside_inbox",
    "leases.test_ledger_dead_letters",
    "leases.test_ledger_errors",
    "leases.test_ledger_worker",
    "test_prefetch",
    "test_stop",
}
"""Modules, below ``integration/txbox_workers``."""

KINDS_AND_LEVELS = [
    ("threads", "READ COMMITTED"),
    ("threads", "REPEATABLE READ"),
    ("threads", "SERIALIZABLE"),
    ("asyncio", "SERIALIZABLE"),
    ("postgres", "SERIALIZABLE"),
]
"""Of a test that is run at all isolation levels: what the level decides is decided below all kinds of workers, and the
strictest one shows that the others have it."""

OVER_OUTBOX = {
    "processing.test_attempts",
    "processing.test_batches",
    "processing.test_conflicts",
    "processing.test_cut_off",
    "processing.test_effects",
    "processing.test_expired",
    "processing.test_order",
    "processing.test_outages",
    "processing.test_parking",
    "processing.test_publishing_effects",
    "processing.test_typed_messages",
    "leases.test_ledger_beside_inbox",
    "test_handlers",
    "test_host_adapters",
    "test_outliving_handlers",
    "test_poisoned_connections",
    "test_poolers",
    "test_prefetch",
    "test_sessions_of_hosts",
    "test_stop",
}
"""Modules whose tests are tests of a ``PostgresWorker``, too; see ``support.workers.outbox_worker``."""

_STATEMENTS = "counts the statements, or has listeners, of the engine for functions"
_DIRECT = "calls parts of the processor without a greenlet"
_BLOCKS = "its handlers block their threads, to wait for each other or for the test"
_INNER = "reaches into the worker"
_CONNECTIONS = "makes more workers, each with a pool, than the server has connections for"
_NO_WORKER = "has no worker"
_SIZES = "of a worker that receives in the thread that processes"

THREADS_ONLY = {
    "test_a_batch_is_one_record_and_one_commit": _STATEMENTS,
    "test_one_transaction_per_message_on_request": _STATEMENTS,
    "test_a_large_batch_that_fails_is_processed_in_tenths_and_those_too": _SIZES,
    "test_an_attempt_that_could_not_be_taken_back_is_taken_back_once_the_database_is_there_again": _DIRECT,
    "test_a_message_that_is_received_after_the_letter_s_commit_is_held_whatever_the_parker_does_next": _DIRECT,
    "test_workers_copies_and_redrives_at_random_end_with_each_message_processed_or_parked": _CONNECTIONS,
    "test_an_attempt_whose_counting_was_not_answered_is_taken_back": _DIRECT,
    "test_a_failure_that_could_not_be_noted_is_noted_later_and_is_no_crash": _DIRECT,
    "test_a_serialization_failure_is_retried_and_never_read_as_a_duplicate": _BLOCKS,
    "test_a_failure_beside_duplicates_is_the_effects": _DIRECT,
    "test_listeners_of_the_hosts_have_their_say_before_the_commit": _STATEMENTS,
    "test_a_lost_answer_to_the_commit_of_an_effect_is_neither_yes_nor_no": _DIRECT,
    "test_a_deadlock_between_two_handlers_is_retried": _BLOCKS,
    "test_a_pool_of_stale_connections_costs_nobody_an_attempt": _BLOCKS,
    "test_a_restart_of_postgres_in_the_middle_of_everything": "its own engine is to have been used by the worker",
    "test_an_attempt_that_was_counted_in_advance_is_taken_back_by_a_stop": _INNER,
    "test_of_several_threads_the_last_one_closes_what_they_share": _BLOCKS,
    "test_run_works_outside_the_main_thread_until_stop": "an AsyncWorker has its event loop where it is run",
    "test_a_handler_may_stop_its_own_worker": _BLOCKS,
    "test_a_slow_handler_holds_little_and_leaves_the_rest_to_other_workers": _BLOCKS,
    "test_the_heartbeat_extends_what_waits_for_a_slow_handler": _BLOCKS,
    "test_in_an_outage_of_the_database_what_is_held_is_handed_back_and_nothing_is_received": _INNER,
    "test_a_function_that_runs_once_refuses_what_it_cannot_judge": _NO_WORKER,
    "test_a_turn_that_does_not_come_in_time_is_not_waited_for": _NO_WORKER,
    "test_transactions_in_turn_come_one_after_the_other": _NO_WORKER,
    "test_a_script_that_cannot_work_is_refused_at_once": _NO_WORKER,
    "test_a_key_is_the_group_or_else_what_the_headers_name_and_fits_an_index": _NO_WORKER,
    "test_who_parks_waits_for_the_transaction_that_processes_the_message": _NO_WORKER,
    "test_who_parks_does_not_wait_for_ever": _NO_WORKER,
    "test_two_copies_that_fail_for_the_last_time_are_parked_by_one_letter": _NO_WORKER,
    "test_letters_that_are_redriven_at_the_same_time_do_not_wait_in_a_circle": _NO_WORKER,
}
"""Tests of those modules that cannot be, and why; those over SQS cannot either: an ``AsyncSqsWorker`` has its own."""

_TOGETHER = "what is parked is not settled in a transaction, so it takes its batch apart"
_TWO_SOURCES = "each of its workers has a source of its own, and which messages come together decides"
_CUT_OFF = "a worker that is cut off from its database is cut off from its messages, too, and has lost its claims"
_LOSES_A_COMMIT = "loses whichever COMMIT comes next, and this source has some, too; see ``postgres/test_outages.py``"
_NOTICED_FIRST = "an outage is noticed by the source: it is the broker that is lost; see ``postgres/test_outages.py``"
_OWN_SERVER = "ends its server, with all that the test knows of the outbox"
_NOT_IN_OUTBOX = "gives the transaction deliveries that are not in the outbox, and those are not applied"
_BY_HAND = "what it gives to the processor by hand stays in the outbox, so its worker has a copy more"
_GROUPS = "FIFO groups are SQS's"
_ACKS = "fails acks, and this source's transactions have settled already; see ``postgres/test_outages.py``"
_LANES = "which messages come together depends on which lanes were free first"
_PUBLISHED = "its letters are put into the outbox, and not sent by a function of the test"
_HOLDS_LANES = "a worker holds the lanes of what it has in hand, so more waits for a slow handler than that"

NOT_OVER_OUTBOX = {
    "test_an_operation_leaves_expired_letters_waiting_unless_it_is_to_redrive_them": _PUBLISHED,
    "test_a_batch_is_one_record_and_one_commit": _STATEMENTS,
    "test_one_transaction_per_message_on_request": _STATEMENTS,
    "test_listeners_of_the_hosts_have_their_say_before_the_commit": _STATEMENTS,
    "test_what_a_listener_of_the_hosts_does_at_the_commit_is_part_of_it": _STATEMENTS,
    "test_without_a_pooler_statements_are_prepared_as_ever": "looks for statements of psycopg's own in the pool",
    "test_a_batch_runs_what_is_young_and_parks_what_is_old_in_one_transaction": _TOGETHER,
    "test_a_serialization_failure_is_retried_and_never_read_as_a_duplicate": _TWO_SOURCES,
    "test_a_deadlock_between_two_handlers_is_retried": _TWO_SOURCES,
    "test_workers_that_are_cut_off_in_turn_make_no_attempts": _CUT_OFF,
    "test_what_was_counted_is_kept_until_it_is_taken_back": _CUT_OFF,
    "test_what_was_not_counted_is_handed_back_at_once": _CUT_OFF,
    "test_a_worker_that_is_cut_off_for_long_lets_others_go_on": _CUT_OFF,
    "test_a_lost_answer_to_commit_is_taken_for_neither_yes_nor_no": _LOSES_A_COMMIT,
    "test_a_database_that_refuses_for_a_while_is_waited_for": _NOTICED_FIRST,
    "test_pauses_grow_while_the_database_is_away_and_begin_small_the_next_time": _NOTICED_FIRST,
    "test_in_an_outage_of_the_database_what_is_held_is_handed_back_and_nothing_is_received": _NOTICED_FIRST,
    "test_a_database_that_falls_silent_holds_the_worker_until_the_connection_breaks": _NOTICED_FIRST,
    "test_a_restart_of_postgres_in_the_middle_of_everything": _OWN_SERVER,
    "test_what_a_letter_and_the_log_say_of_attempts_is_what_became_of_each": _BY_HAND,
    "test_a_failure_beside_duplicates_is_the_effects": _NOT_IN_OUTBOX,
    "test_what_it_sets_does_not_reach_the_question_for_parked_messages": _NOT_IN_OUTBOX,
    "test_under_a_lease_it_is_parked_at_once_and_no_work_is_begun": "has a ledger and no inbox",
    "test_groups_keep_their_order_over_failures": _GROUPS,
    "test_a_lost_answer_to_the_commit_of_an_effect_is_neither_yes_nor_no": _LOSES_A_COMMIT,
    "test_a_settlement_that_cannot_be_made_costs_a_redelivery_at_most": _ACKS,
    "test_a_batch_handler_is_given_the_first_timers_of_a_batch_at_once": _LANES,
    "test_a_slow_handler_holds_little_and_leaves_the_rest_to_other_workers": _HOLDS_LANES,
    "test_a_large_batch_that_fails_is_processed_in_tenths_and_those_too": _SIZES,
    "test_of_several_threads_the_last_one_closes_what_they_share": _SIZES,
    "test_a_turn_that_does_not_come_in_time_is_not_waited_for": _NO_WORKER,
    "test_transactions_in_turn_come_one_after_the_other": _NO_WORKER,
    "test_a_script_that_cannot_work_is_refused_at_once": _NO_WORKER,
    "test_a_key_is_the_group_or_else_what_the_headers_name_and_fits_an_index": _NO_WORKER,
    "test_who_parks_waits_for_the_transaction_that_processes_the_message": _NO_WORKER,
    "test_who_parks_does_not_wait_for_ever": _NO_WORKER,
    "test_two_copies_that_fail_for_the_last_time_are_parked_by_one_letter": _NO_WORKER,
    "test_letters_that_are_redriven_at_the_same_time_do_not_wait_in_a_circle": _NO_WORKER,
    "test_a_session_of_the_user_s_prepares_nothing_once_it_has_recorded_or_published": _NO_WORKER,
    "test_the_url_may_say_when_statements_are_prepared": _NO_WORKER,
    "test_connections_that_the_pool_had_prepare_nothing_either_once_a_pooler_is_noticed": _NO_WORKER,
    "test_a_ledger_goes_on": _NO_WORKER,
    "test_a_ledger_without_rights_says_so": _NO_WORKER,
    "test_bookkeeping_recovers_one_connection_at_a_time": _NO_WORKER,
    "test_a_relay_goes_on": _NO_WORKER,
    "test_a_database_that_is_not_utf_8_is_refused_at_the_start": _NO_WORKER,
    "test_a_database_without_an_encoding_is_refused_too": _NO_WORKER,
}
"""Tests of the modules ``OVER_OUTBOX`` that cannot be, and why."""
