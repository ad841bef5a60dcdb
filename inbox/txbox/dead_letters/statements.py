"""The statements of ``dead_letters.sql``."""

from txbox.dead_letters.order import OrderStatements
from txbox.postgres.sql_files import SqlFile


class DeadLetterStatements(SqlFile, file="dead_letters.sql", fragments_of=OrderStatements):
    park: str
    mark_parked: str
    mark_expired: str
    find_recorded: str
    await_redrive: str
    unmark_parked: str
    mark_others_mismatch: str
    waits_parked: str
    lease_attempts: str
    wanted: str
    finds_json: str
    check_json_path: str
    create_json_function: str
    drop_json_function: str
    letters: str
    passed_over: str
    matching_counts: str
    store_operation: str
    store_selection: str
    operations: str
    next_selected: str
    lock_selected: str
    record_outcome: str
    retry_failed: str
    finish_operation: str
    letter_of: str
    lock_letters: str
    mark_redriven: str
    mark_discarded: str
    letter_counts: str
