"""The TCP proxy, where tests of this repository look for it, and one that counts."""

from txbox_local.tcp_proxy import COMMIT, TcpProxy

__all__ = ["COMMIT", "CountingProxy", "TcpProxy"]


class CountingProxy(TcpProxy):
    """Counts what goes to the server; one round trip begins with one packet, as statements are small.

    https://www.postgresql.org/docs/current/protocol-message-formats.html
    """

    packets = 0
    statements = 0

    def _is_lost(self, before: bytes, data: bytes) -> bool:
        self.packets += 1
        at = 0
        while at + 5 <= len(data) and (kind := data[at : at + 1]).isalpha():  # what starts a connection has no kind
            self.statements += kind in b"EQ"  # Execute, Query
            at += 1 + int.from_bytes(data[at + 1 : at + 5])
        return super()._is_lost(before, data)
