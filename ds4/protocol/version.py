"""Protocol versions and the 8-byte preface that opens each direction of a connection.

Invariant: eight bytes are enough to refuse any other version, older or newer, because the preface
never changes. Nothing here knows what frames contain.

Layout: 4 magic bytes, u16 major, u16 minor, both big-endian. The first magic byte is not ASCII and
not a TLS record type, so a browser, a port scanner or a TLS client is told apart at its first byte.

A newer minor version may append trailing fields with defaults to a message; both sides then speak
the lower of the two minors, exactly. Any other change is a new major, and majors do not mix.
"""

from __future__ import annotations

import struct

import attrs

from ds4.errors import RemoteProtocolError

__all__ = ["CURRENT", "MAGIC", "PREFACE_BYTES", "Version", "check_magic", "negotiate"]

MAGIC = b"\x89DS4"
PREFACE_BYTES = 8
_LAYOUT = struct.Struct(">4sHH")


@attrs.frozen(order=True)
class Version:
    """A protocol version, 0 <= major, minor < 65536."""

    major: int
    minor: int

    def preface(self) -> bytes:
        """The 8 bytes that announce this version."""
        return _LAYOUT.pack(MAGIC, self.major, self.minor)

    @classmethod
    def from_preface(cls, data: bytes) -> Version:
        """Read a whole preface.

        Args:
          data: exactly 8 bytes.

        Raises:
          RemoteProtocolError: the magic is wrong (reason `magic`).
        """
        check_magic(data)
        _, major, minor = _LAYOUT.unpack(data)
        return cls(major, minor)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


CURRENT = Version(1, 0)


def check_magic(data: bytes) -> None:
    """Refuse a wrong start as soon as its first wrong byte is here.

    Only that byte enters the text, so that the error does not depend on how the bytes were cut.

    Args:
      data: the first bytes of a connection; may be incomplete.

    Raises:
      RemoteProtocolError: reason `magic`.
    """
    for index, (found, expected) in enumerate(zip(data, MAGIC, strict=False)):
        if found == expected:
            continue
        guess = ""
        if index == 0 and found == 0x16:
            guess = "; it looks like a TLS client"
        elif index == 0 and 0x41 <= found <= 0x5A:
            guess = "; it looks like an HTTP client"
        raise RemoteProtocolError(
            f"not a ds4 peer: byte {index} of the preface is 0x{found:02x}, "
            f"expected 0x{expected:02x}{guess}",
            reason="magic",
        )


def negotiate(ours: Version, theirs: Version) -> int:
    """Return the minor version both sides speak from now on: the lower one.

    Raises:
      RemoteProtocolError: the majors differ (reason `version`); names both versions.
    """
    if ours.major != theirs.major:
        age = "newer" if theirs > ours else "older"
        raise RemoteProtocolError(
            f"peer speaks protocol {theirs}, {age} than ours {ours}; "
            "install the same ds4 version on every rank",
            reason="version",
        )
    return min(ours.minor, theirs.minor)
