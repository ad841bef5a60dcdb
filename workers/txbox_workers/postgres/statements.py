"""The statements of ``source.sql``."""

from txbox.postgres.sql_files import SqlFile
from txbox.relay.sender import RelayStatements


class LaneStatements(SqlFile, file="source.sql", fragments_of=RelayStatements):
    begin_claims: str
    join_members: str
    leave_members: str
    count_members: str
    claim_lanes: str
    release_lanes: str
    take_over: str
    held_heads: str
    read_lanes: str
    read_again: str
    async_commit: str
    mark_begun: str
    unmark: str
    plan_by_place: str
    settle: str
    delete_messages: str
    postpone_messages: str
