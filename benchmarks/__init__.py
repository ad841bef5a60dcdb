"""Benchmarks: each measures txbox and, beside it in the same run, a limit by simpler means.

consumer    a worker against pgbench with the same SQL, and against a bare loop around the same handler
outbox_worker  a worker over the outbox against the same over memory, and against pgbench
record      what one ``Inbox.record`` costs the client
relay       what publishing costs, how fast a relay is, how soon a message arrives
ledger      leases against a plain conditional UPDATE
deadlocks   workers whose handlers run into deadlocks against fixed settings
audit       an audit of a million messages, with faults planted, all of which it has to name
bulk_load   Spark and the inbox against raw COPY and the same merge by psql
peers       other systems that promise the same or less, each a program in an environment of its own

``shared`` holds what they have in common. The ratios mean something; the absolute figures are those of one machine on
one day.
"""
