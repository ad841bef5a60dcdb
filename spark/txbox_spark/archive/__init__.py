"""Archives of what was sent and processed, in Parquet by day, so that Postgres may forget it.

::

    FOLDER/sent/day=2026-11-20/part-….parquet          messages that relays have sent and keep
    FOLDER/processed/day=2026-11-20/part-….parquet     ids of every subscriber's inbox
    FOLDER/_txbox/archive.json                         the archive's id
    FOLDER/_txbox/stretches/2026-11-18.json            days that were added together, with their files and rows
    FOLDER/_txbox/staged/…                             days that are being written

The table ``archive`` says how far an archive reaches. Maintainers and relays forget nothing beyond that point.
"""
