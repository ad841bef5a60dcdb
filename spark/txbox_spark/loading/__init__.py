"""A bulk load at work, in the order of its files: loader, resume, copy_writer or jdbc_writer, ledger."""
