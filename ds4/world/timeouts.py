"""Every bound on waiting, in one place: seconds, with what each of them covers.

Invariant: no wait for a peer has another source of time than this. Values are arguments, so that a
test in virtual time and a slow machine can use their own.
"""

from __future__ import annotations

import math

import attrs

from ds4.errors import ConfigError

__all__ = ["DEFAULT_TIMEOUTS", "Timeouts"]


def _positive(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"timeout {attribute.name} must be a number, got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"timeout {attribute.name} must be > 0 seconds, got {value}")


def _seconds(default: float) -> float:
    return attrs.field(default=default, validator=_positive)


@attrs.frozen(kw_only=True)
class Timeouts:
    """Bounds in seconds.

    Attributes:
      dial_s: for all ranks to arrive, and for a rank to reach its head.
      dial_retry_s: between two attempts to reach the head.
      report_s: between two lines about what is being waited for.
      hello_s: from accept to a complete hello; a stray connection is dropped after it.
      setup_s: for one answer in which no work is done: config, vote.
      load_silence_s: without any frame from a loading rank.
      load_progress_s: between two progress frames.
      bootstrap_s: for the data plane to connect and test itself.
      warm_up_s: for the first run of the kernels, which may compile them.
      step_floor_s: least bound of a step.
      step_first_s: bound of the first step in a bucket.
      step_p99_factor: bound of later steps, times the bucket's 99th percentile.
      operation_s: for one session operation or one snapshot.
      ack_skew_s: between the first rank's answer to a step and the last's.
      rank_timeout_s: silence of an idle peer.
      ping_s: between pings.
      blame_s: wait for the cause after a failure that may be a consequence.
      write_s: for a peer to take one frame.
      drain_s: for an orderly stop.
      farewell_s: for the last words of a failed world.
      abort_s: from failure to the end of this process; then it is ended the hard way.
      kill_s: for a child process to end by itself, before it is killed.
    """

    dial_s: float = _seconds(300.0)
    dial_retry_s: float = _seconds(0.2)
    report_s: float = _seconds(10.0)
    hello_s: float = _seconds(10.0)
    setup_s: float = _seconds(30.0)
    load_silence_s: float = _seconds(60.0)
    load_progress_s: float = _seconds(5.0)
    bootstrap_s: float = _seconds(60.0)
    warm_up_s: float = _seconds(300.0)
    step_floor_s: float = _seconds(10.0)
    step_first_s: float = _seconds(120.0)
    step_p99_factor: float = _seconds(20.0)
    operation_s: float = _seconds(60.0)
    ack_skew_s: float = _seconds(5.0)
    rank_timeout_s: float = _seconds(10.0)
    ping_s: float = _seconds(1.0)
    blame_s: float = _seconds(1.0)
    write_s: float = _seconds(10.0)
    drain_s: float = _seconds(30.0)
    farewell_s: float = _seconds(1.0)
    abort_s: float = _seconds(10.0)
    kill_s: float = _seconds(3.0)

    @classmethod
    def with_rank_timeout(cls, seconds: float | None) -> Timeouts:
        """The defaults, with another bound on a silent peer (`--rank-timeout`).

        The floor of a step follows it, because a step in which a peer hangs looks the same.
        """
        if seconds is None:
            return cls()
        return cls(rank_timeout_s=seconds, step_floor_s=seconds, write_s=seconds)

    def with_dial(self, seconds: float) -> Timeouts:
        """The same with another bound on all ranks arriving."""
        return attrs.evolve(self, dial_s=seconds)


DEFAULT_TIMEOUTS = Timeouts()
