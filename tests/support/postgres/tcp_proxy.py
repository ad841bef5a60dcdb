"""The TCP proxy, where tests of this repository look for it."""

from txbox_local.tcp_proxy import COMMIT, TcpProxy

__all__ = ["COMMIT", "TcpProxy"]
