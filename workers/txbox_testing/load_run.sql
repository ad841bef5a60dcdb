-- End a bulk load at one of its places. The client binds the values: a server could not prepare these statements.

-- name: make_end
-- Create the function that refuses a transaction. It ends with this session.
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
-- From now on, refuse transactions that merge a chunk, beginning with the n-th, where n is ``passes``.
-- parameters: passes int
-- returns: nothing
CREATE CONSTRAINT TRIGGER txbox_testing_end AFTER INSERT ON {{bulk_load_chunk}}
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION pg_temp.txbox_testing_end(%(passes)s)

-- name: end_at_finish
-- From now on, refuse to finish a load.
-- parameters: none
-- returns: nothing
CREATE TRIGGER txbox_testing_end BEFORE UPDATE ON {{bulk_load}} FOR EACH ROW
WHEN (OLD.finished_at IS NULL AND NEW.finished_at IS NOT NULL) EXECUTE FUNCTION pg_temp.txbox_testing_end()

-- name: drop_end
-- Stop refusing.
-- parameters: none
-- returns: nothing
DROP FUNCTION pg_temp.txbox_testing_end() CASCADE

-- name: unfinished
-- The unfinished run that began last.
-- parameters: none
-- returns: run_id; no row if there is none
SELECT run_id FROM {{bulk_load}} WHERE finished_at IS NULL ORDER BY started_at DESC LIMIT 1
