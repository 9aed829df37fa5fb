"""What ranks do together: join partial sums, gather slices. One interface, several transports."""

from ds4.collectives.base import Collective, SoloCollective
from ds4.collectives.tcp import CollectiveListener, CollectiveStatistics, TcpCollective

__all__ = [
    "Collective",
    "CollectiveListener",
    "CollectiveStatistics",
    "SoloCollective",
    "TcpCollective",
]
