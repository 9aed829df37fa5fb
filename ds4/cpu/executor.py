"""`CpuExecutor`: the step executor of a rank without a GPU."""

from __future__ import annotations

import hashlib
import time

import numba
import numpy as np
from numpy.typing import NDArray

from ds4.collectives import Collective, SoloCollective
from ds4.cpu.forward import Forward, Segment
from ds4.cpu.state import SessionState
from ds4.cpu.weights import Weights
from ds4.errors import ConfigError
from ds4.gguf import GGUFFile
from ds4.ids import SessionId
from ds4.model.deepseek4.rounding import Rounding
from ds4.model.deepseek4.tensors import load_shape
from ds4.partition.ownership import Ownership
from ds4.sampling import sample
from ds4.session_table import SessionTable, batches, wanted_rows
from ds4.steps import Chunk, Decode, RowResult, StepPlan, StepResult, Want

__all__ = ["MAX_ROWS", "CpuExecutor"]

MAX_ROWS = 256
"""Most rows of one forward pass; longer plans run as several. Bounds memory, not results."""


class CpuExecutor(SessionTable[SessionState]):
    """Runs steps on the CPU. Implements `ds4.executor.StepExecutor`.

    Args:
      file: an opened file; closed by `close`.
      rounding: activation rounding switch.
      threads: most worker threads; None takes every core this process may use. Small batches
        use one, whatever the limit.
      own: this rank's shards; None for a world of one.
      collective: how ranks join; None for a world of one.

    Raises:
      ModelFileError: the file is not a usable model.
      ConfigError: more threads than Numba was started with.
    """

    def __init__(
        self,
        file: GGUFFile,
        *,
        rounding: Rounding = Rounding.NONE,
        threads: int | None = None,
        own: Ownership | None = None,
        collective: Collective | None = None,
    ) -> None:
        self.file = file
        self.shape = load_shape(file)
        self.rounding = rounding
        self.collective: Collective = collective or SoloCollective()
        limit = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]  # set at import
        threads = limit if threads is None else threads
        if not 1 <= threads <= limit:
            raise ConfigError(f"threads must be from 1 to {limit} here, got {threads}")
        self.forward = Forward(
            Weights(file, self.shape),
            own or Ownership.of(self.shape),
            self.collective,
            rounding,
            threads,
        )
        identity = hashlib.blake2b(file.header_digest() + rounding.encode(), digest_size=16)
        super().__init__(self.shape.n_vocab, identity.digest())

    # -- sessions ----------------------------------------------------------------------------

    def open_session(self, session: SessionId, n_ctx: int) -> None:
        """See `StepExecutor.open_session`."""
        if session in self._sessions:
            raise ConfigError(f"session {session} is open already")
        if not 1 <= n_ctx <= self.shape.n_ctx_train:
            raise ConfigError(
                f"context must be from 1 to {self.shape.n_ctx_train} for this model, got {n_ctx}"
            )
        self._sessions[session] = SessionState(self.shape, n_ctx, min(MAX_ROWS, n_ctx))

    def close(self) -> None:
        """See `StepExecutor.close`."""
        self._sessions.clear()
        self.collective.close()
        self.file.close()

    # -- steps -------------------------------------------------------------------------------

    def step(self, plan: StepPlan) -> StepResult:
        """See `StepExecutor.step`."""
        self.check(plan)
        begin = time.perf_counter()
        logits: dict[SessionId, list[NDArray[np.float32]]] = {}
        for batch in batches(plan, MAX_ROWS):
            segments: list[Segment] = []
            wanted: list[NDArray[np.int64]] = []
            owners: list[tuple[SessionId, int]] = []
            first = 0
            for entry, tokens, is_last in batch:
                segments.append(Segment(self._state(entry.session), tokens, first))
                rows = wanted_rows(entry.want, int(tokens.size), is_last)
                wanted.append(first + np.arange(rows.start, rows.stop))
                owners.append((entry.session, len(rows)))
                first += int(tokens.size)
            out = self.forward.run(segments, np.concatenate(wanted))
            at = 0
            for session, n in owners:
                if n:
                    logits.setdefault(session, []).append(out[at : at + n])
                    at += n
        rows_out = tuple(
            self._result(entry, logits[entry.session])
            for entry in plan.entries()
            if entry.want != Want.NOTHING
        )
        for entry in plan.prefill:
            self._state(entry.session).checkpoint()
        return StepResult(
            step=plan.step,
            rows=rows_out,
            digest=self._digest(plan),
            device_s=time.perf_counter() - begin,
        )

    def _result(self, entry: Chunk | Decode, pieces: list[NDArray[np.float32]]) -> RowResult:
        logits = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
        token = sample(logits[-1], entry.sampling, self._state(entry.session).length)
        if entry.want == Want.TOKEN:
            return RowResult(session=entry.session, token=token)
        if entry.want == Want.TOKEN_AND_LOGITS:
            logits = logits[-1:]
        return RowResult(session=entry.session, token=token, logits=logits)
