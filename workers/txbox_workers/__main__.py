"""``python -m txbox_workers``: the command line, where no script ``txbox`` is on the path."""

from txbox_workers.cli import main

if __name__ == "__main__":
    main()
