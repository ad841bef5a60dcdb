-- The end of a bulk load at one of its places. Values are bound by the client: these are no statements that a server
-- could prepare.

-- name: make_end
-- Make the function that refuses a transaction; it goes with this session.
-- parameters: text text (of the error)
-- returns: nothing
CREATE FUNCTION pg_temp.txbox_testing_end() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_NARGS = 0 OR TG_ARGV[0]::int <= 1 + (
    SELECT count(*) FROM {{bulk_load_chunk}} WHERE run_id = NEW.run_id AND xmin <> pg_current_xact_id()::xid
  ) THEN
    RAISE EXCEPTION USING MESSAGE = %(text)s;
  END IF;
  RETURN NEW;
END
$$

-- name: end_at_chunk
-- From now on, no transaction commits that merges a chunk, once one less than so many chunks have committed.
-- parameters: passes int
-- returns: nothing
CREATE CONSTRAINT TRIGGER txbox_testing_end AFTER INSERT ON {{bulk_load_chunk}}
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION pg_temp.txbox_testing_end(%(passes)s)

-- name: end_at_finish
-- From now on, no load is finished.
-- parameters: none
-- returns: nothing
CREATE TRIGGER txbox_testing_end BEFORE UPDATE ON {{bulk_load}} FOR EACH ROW
WHEN (OLD.finished_at IS NULL AND NEW.finished_at IS NOT NULL) EXECUTE FUNCTION pg_temp.txbox_testing_end()

-- name: drop_end
-- Refuse nothing any more.
-- parameters: none
-- returns: nothing
DROP FUNCTION pg_temp.txbox_testing_end() CASCADE

-- name: unfinished
-- The run that has begun last, and is not finished.
-- parameters: none
-- returns: run_id; no row if there is none
SELECT run_id FROM {{bulk_load}} WHERE finished_at IS NULL ORDER BY started_at DESC LIMIT 1
