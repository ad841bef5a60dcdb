"""``python -m txbox_cli``: the command line where no ``txbox`` script is on the path."""

from txbox_cli import main

if __name__ == "__main__":
    main()
