"""Bootstrap offers of CPU ranks: the addresses that their collectives listen on.

A rank that listens on every interface cannot know by which address others reach it. The head does:
the rank runs on the head's host, and other hosts have dialled the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgpack
import trio

from ds4.errors import ConfigError

__all__ = ["WILDCARDS", "pack_address", "public_offers", "unpack_address"]

WILDCARDS = ("0.0.0.0", "::")  # compared with, not bound to


def pack_address(host: str, port: int) -> bytes:
    """An offer."""
    data: bytes = msgpack.packb([host, port])
    return data


def unpack_address(offer: bytes) -> tuple[str, int]:
    """The address in an offer.

    Raises:
      ConfigError: it holds none.
    """
    try:
        host, port = msgpack.unpackb(offer)
        if not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 65536:
            raise ValueError("not a host and a port")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ConfigError(f"a rank offers no address for collectives: {error}") from error
    return host, port


def public_offers(
    transport: str, offers: Sequence[bytes], streams: Iterable[trio.abc.Stream]
) -> list[bytes]:
    """Offers in which wildcard hosts are replaced by the address that other hosts dial.

    Args:
      transport: data plane; only `tcp` offers are addresses.
      offers: in rank order.
      streams: of all ranks, at the head.
    """
    if transport != "tcp":
        return list(offers)
    reached = "127.0.0.1"
    for stream in streams:
        if isinstance(stream, trio.SocketStream):
            host = str(stream.socket.getsockname()[0])
            if not host.startswith("127.") and host != "::1":
                reached = host
    result = []
    for offer in offers:
        host, port = unpack_address(offer)
        result.append(pack_address(reached if host in WILDCARDS else host, port))
    return result
