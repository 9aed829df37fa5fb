"""What ranks do together: join partial sums, gather slices. One interface, several transports."""

from ds4.collectives.base import Collective, SoloCollective

__all__ = ["Collective", "SoloCollective"]
