"""Proof that both ends of a link hold the same cluster key, before any other frame counts.

Invariant: a `Response` is accepted only from a side that holds the key and answers this very pair
of challenges, in its own role. Pure: the nonces come from the caller, who must draw them from the
operating system's random source, once per connection.

  mac = HMAC-SHA-256(key, label | role | rank | leader nonce | worker nonce | geometry hash)

with `role` and `rank` of the side that proves itself, and the nonces in fixed order, leader first.
- A replayed response fails, because the verifier's nonce is new.
- A reflected response fails, because the role under the MAC is not the reflector's.
- A rank cannot pass for another rank or another geometry: its hello must repeat what it proved.
- The leader answers second, so it never produces a MAC for a stranger.

What it does not do: frames after it carry no MAC. Someone who can alter packets between two members
can still alter them later. On a network that is not trusted, run the links through a tunnel.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from ds4.errors import ConfigError, LocalProtocolError
from ds4.protocol.messages import Challenge, Response, Role

__all__ = ["MIN_KEY_BYTES", "NONCE_BYTES", "ClusterKey"]

MIN_KEY_BYTES = 16
"""A shorter key could be guessed offline from one recorded handshake."""
NONCE_BYTES = 32
_LABEL = b"ds4 cluster membership 1\0"
_HEAD = struct.Struct(">BI")


class ClusterKey:
    """A shared secret. Never shown by `repr` and never sent.

    Args:
      key: at least 16 bytes, as read from the key file.

    Raises:
      ConfigError: the key is shorter.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) < MIN_KEY_BYTES:
            raise ConfigError(
                f"--cluster-key-file holds {len(key)} bytes, at least {MIN_KEY_BYTES} are needed"
            )
        self._key = bytes(key)

    def __repr__(self) -> str:
        return "ClusterKey(...)"

    def _mac(self, prover: Challenge, verifier: Challenge) -> bytes:
        if prover.role == verifier.role:
            raise LocalProtocolError(
                f"both challenges come from role {prover.role}", reason="membership"
            )
        leader, worker = (prover, verifier) if prover.role == Role.LEADER else (verifier, prover)
        text = b"".join(
            (
                _LABEL,
                _HEAD.pack(prover.role, prover.rank),
                leader.nonce,
                worker.nonce,
                prover.geometry_hash,
            )
        )
        return hmac.digest(self._key, text, hashlib.sha256)

    def respond(self, ours: Challenge, theirs: Challenge) -> Response:
        """Prove ourselves.

        Args:
          ours: the challenge this side sent.
          theirs: the challenge it received.

        Raises:
          LocalProtocolError: both have the same role (reason `membership`).
        """
        return Response(mac=self._mac(ours, theirs))

    def accepts(self, response: Response, prover: Challenge, verifier: Challenge) -> bool:
        """Whether `response` proves the side that sent the challenge `prover`.

        Takes the same time for every wrong MAC.
        """
        return hmac.compare_digest(response.mac, self._mac(prover, verifier))
