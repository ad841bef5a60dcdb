"""The TCP proxy, where tests of this repository look for it, and one that counts."""

from txbox_local.tcp_proxy import COMMIT, TcpProxy

__all__ = ["COMMIT", "CountingProxy", "TcpProxy"]


class CountingProxy(TcpProxy):
    """Counts what goes to the server; one round trip begins with one packet, as statements are small."""

    packets = 0

    def _is_lost(self, before: bytes, data: bytes) -> bool:
        self.packets += 1
        return super()._is_lost(before, data)
