-- A role for each process of txbox. Run it in the schema of txbox's tables, as someone who may create roles
-- and grant rights on the tables (CREATEROLE; their owner, or an administrator). Give each role USAGE on that
-- schema and a login. Keep what you need. Roles belong to the server: for a second database, run the grants.

-- A worker, besides what its handlers need.
CREATE ROLE txbox_worker;
GRANT SELECT, INSERT, DELETE ON processed_message TO txbox_worker;
GRANT SELECT ON processed_earlier TO txbox_worker;
GRANT SELECT, INSERT, UPDATE, DELETE ON message_failure TO txbox_worker;
GRANT SELECT, INSERT, UPDATE ON handler_conflict TO txbox_worker;
GRANT SELECT, INSERT, UPDATE ON dead_letter TO txbox_worker;
GRANT SELECT, INSERT, UPDATE, DELETE ON worker_report, reported_activity
    TO txbox_worker;
GRANT SELECT ON paused TO txbox_worker;
GRANT SELECT ON inbox_horizon TO txbox_worker;
-- Where it takes its messages from the outbox, inbox:SUBSCRIBER:
GRANT SELECT, INSERT, UPDATE ON inbox_lane TO txbox_worker;
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_message TO txbox_worker;

-- A web service that handles HTTP requests once, in the transaction.
CREATE ROLE txbox_web;
GRANT SELECT, INSERT, DELETE ON processed_message TO txbox_web;
GRANT SELECT ON processed_earlier, inbox_horizon, dead_letter TO txbox_web;
GRANT SELECT, INSERT, UPDATE ON kept_response TO txbox_web;
-- Where the inbox rotates, and a worker parks messages of the same subscriber:
GRANT UPDATE ON dead_letter TO txbox_web;

-- Leases and watermarks, with or without an inbox.
CREATE ROLE txbox_lease;
GRANT SELECT, INSERT, UPDATE ON message_lease TO txbox_lease;
GRANT SELECT ON inbox_horizon, dead_letter TO txbox_lease;
GRANT SELECT, INSERT, UPDATE, DELETE ON aggregate_watermark TO txbox_lease;

-- A publisher (also a handler that publishes), and a relay.
CREATE ROLE txbox_publisher;
GRANT SELECT, INSERT ON outbox_message TO txbox_publisher;
-- Where it publishes to topics:
GRANT SELECT ON subscription TO txbox_publisher;
CREATE ROLE txbox_relay;
GRANT SELECT, INSERT, UPDATE, DELETE
    ON outbox_message, outbox_relay, outbox_sent, reported_activity
    TO txbox_relay;
GRANT SELECT ON paused, archive TO txbox_relay;
GRANT SELECT, INSERT, UPDATE ON dead_letter TO txbox_relay;

-- A maintainer. To drop generations, and to run `txbox db rotate-inbox`, it has to own the inbox's tables;
-- to drop staging tables, those.
CREATE ROLE txbox_maintainer;
GRANT SELECT, UPDATE, DELETE ON processed_message, message_failure,
    message_lease, dead_letter, dead_letter_operation, dead_letter_selection,
    outbox_sent, outbox_relay, bulk_load, bulk_load_chunk, worker_report,
    reported_activity, operator_action, kept_response
    TO txbox_maintainer;
GRANT SELECT, INSERT, UPDATE ON maintenance, inbox_horizon TO txbox_maintainer;
GRANT SELECT ON inbox_generation, archive TO txbox_maintainer;

-- What only reads: the exporter, `txbox status`, `txbox audit` without --record. To see other users'
-- transactions, it needs pg_read_all_stats as well. And an operator, with commands or with the dashboard,
-- who reads, too.
CREATE ROLE txbox_reader;
GRANT SELECT ON processed_message, processed_earlier, message_failure,
    handler_conflict, dead_letter, dead_letter_operation, dead_letter_selection,
    message_lease, aggregate_watermark, outbox_message, outbox_relay,
    outbox_sent, worker_report, reported_activity, paused, inbox_horizon,
    inbox_generation, maintenance, archive, bulk_load, bulk_load_chunk,
    kept_response, operator_action, inbox_lane, subscription
    TO txbox_reader;
CREATE ROLE txbox_operator;
GRANT txbox_reader TO txbox_operator;
-- To redrive, discard and import letters:
GRANT INSERT, DELETE ON processed_message TO txbox_operator;
GRANT DELETE ON message_failure TO txbox_operator;
GRANT INSERT, UPDATE
    ON dead_letter, dead_letter_operation, dead_letter_selection
    TO txbox_operator;
-- To redrive a relay's letters, and to replay:
GRANT INSERT ON outbox_message TO txbox_operator;
-- To pause and resume, and to change who gets the messages of a topic:
GRANT INSERT, DELETE ON paused, subscription TO txbox_operator;
-- From the dashboard:
GRANT INSERT ON operator_action TO txbox_operator;
