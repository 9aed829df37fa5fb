"""`CudaExecutor`: the step executor of a rank with a GPU."""

from __future__ import annotations

import hashlib
from typing import Self

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.cuda.device import Device, open_device
from ds4.cuda.graph import BUCKETS, Buckets, bucket_of
from ds4.cuda.join import DeviceJoin, SoloJoin
from ds4.cuda.memory import Arena, MemoryLayout
from ds4.cuda.source import STAGING_BYTES, FileSource, Uploader, WeightSource
from ds4.cuda.state import DeviceSession, SessionPool
from ds4.cuda.step import Program
from ds4.cuda.weights import DeviceWeights
from ds4.cuda.workspace import META_FIELDS, StepLimits, Workspace
from ds4.errors import ConfigError, DeviceError, OutOfDeviceMemory
from ds4.gguf import GGUFFile
from ds4.ids import SessionId, Token
from ds4.model.deepseek4.rounding import Rounding
from ds4.model.deepseek4.tensors import load_shape
from ds4.partition.ownership import Ownership
from ds4.sampling import sample
from ds4.session_table import Piece, SessionTable, batches, wanted_rows
from ds4.steps import Chunk, Decode, RowResult, StepPlan, StepResult, Want

__all__ = ["CudaExecutor", "CudaOptions"]

_META_SLOTS = 64
_RESERVE_BYTES = 1 << 30  # left for the driver, graphs and compiled kernels


@attrs.frozen(kw_only=True)
class CudaOptions:
    """How a rank uses its device.

    Attributes:
      ordinal: device ordinal in this process.
      exact: float32 activations in every product; else signed bytes where weights are packed.
      max_context: longest session in tokens.
      max_sessions: sessions open at once; fewer where memory does not hold as many of that length.
      use_graphs: replay captured graphs; else enqueue launches one by one (for debugging).
      overlap: let every kernel of a graph start before its predecessor has ended. No influence on
        results. Off, because it made a whole step slower (one H200: 8.2 instead of 7.7 ms).
      checkpoints: earlier states kept per session, for rewinding.
    """

    ordinal: int = 0
    exact: bool = True
    max_context: int = 32768
    max_sessions: int = 8
    use_graphs: bool = True
    overlap: bool = False
    checkpoints: int = 4


class CudaExecutor(SessionTable[DeviceSession]):
    """Runs steps on a GPU. Implements `ds4.executor.StepExecutor`.

    Args:
      source: the model's weights.
      identity: of model and switches; part of every snapshot.
      options: use of the device.
      rounding: activation rounding switch; only `none` runs on CUDA.
      own: this rank's shards; None for a world of one.
      join: how ranks add their partial sums; None for a world of one.
      file: closed by `close`, where the source reads one.

    Raises:
      ConfigError: the model or a switch is not supported on CUDA.
      OutOfDeviceMemory: the memory plan does not fit; the text has the arithmetic.
    """

    def __init__(
        self,
        source: WeightSource,
        identity: bytes,
        *,
        options: CudaOptions | None = None,
        rounding: Rounding = Rounding.NONE,
        own: Ownership | None = None,
        join: DeviceJoin | None = None,
        file: GGUFFile | None = None,
    ) -> None:
        if rounding is not Rounding.NONE:
            raise ConfigError(
                f"activation rounding {rounding.value!r} runs on the cpu backend only; "
                "use --backend cpu or --activation-rounding none"
            )
        self.options = opts = options or CudaOptions()
        self.file = file
        self.shape = source.shape
        super().__init__(self.shape.n_vocab, identity)
        self.join = join or SoloJoin()
        self.device: Device = open_device(opts.ordinal)
        try:
            self._build(source, own or Ownership.of(self.shape))
        except BaseException:
            self.device.close()
            raise

    @classmethod
    def from_file(
        cls,
        file: GGUFFile,
        *,
        options: CudaOptions | None = None,
        rounding: Rounding = Rounding.NONE,
        own: Ownership | None = None,
        join: DeviceJoin | None = None,
    ) -> Self:
        """Run an opened file; closed by `close`. Snapshots fit the CPU backend's and back.

        Raises: as the class, and ModelFileError for a file that is not a usable model.
        """
        identity = hashlib.blake2b(
            file.header_digest() + rounding.encode(), digest_size=16
        ).digest()
        source = FileSource(file, load_shape(file))
        return cls(
            source, identity, options=options, rounding=rounding, own=own, join=join, file=file
        )

    # -- construction ------------------------------------------------------------------------

    def _build(self, source: WeightSource, own: Ownership) -> None:
        opts, s, device = self.options, self.shape, self.device
        if own.vocabulary != (0, 8):
            raise ConfigError("a rank with part of the vocabulary cannot run on CUDA yet")
        limits = StepLimits(
            max_rows=BUCKETS[-1],
            max_context=min(opts.max_context, s.n_ctx_train),
            max_sessions=opts.max_sessions,
            checkpoints=opts.checkpoints,
        )
        self.limits = limits
        layout = MemoryLayout()
        # No more than a small model's file, so that a test of one needs no 64 MB.
        wanted = STAGING_BYTES if self.file is None else min(STAGING_BYTES, self.file.file_bytes)
        staging = layout.reserve("staging", "staging", (2, -(-wanted // 512) * 512), np.uint8)
        Workspace(DeviceWeights(source, own, layout), limits, layout)
        one = SessionPool.session_elements(s, limits.max_context, limits.checkpoints)
        free, _ = device.memory()
        room = (free - layout.total_bytes - _RESERVE_BYTES) // (4 * one)
        if room < 1:
            plan = layout.text()
            raise OutOfDeviceMemory(
                f"weights and workspace need {plan}, one session of {limits.max_context} tokens "
                f"{4 * one / 2**30:.2f} GiB, the reserve {_RESERVE_BYTES / 2**30:.0f} GiB; "
                f"{free / 2**30:.2f} GiB are free on device {device.ordinal}"
            )
        state_place = layout.reserve("sessions", "state", min(room, opts.max_sessions) * one,
                                     np.float32)  # fmt: skip
        self.memory_plan = layout
        arena = Arena(device, layout)
        again, uploader = MemoryLayout(), Uploader(device, arena.view(staging))
        again.reserve("staging", "staging", staging.shape, np.uint8)
        # The same reservations in the same order: every array comes to lie where it was planned.
        self.weights = DeviceWeights(source, own, again, arena, uploader)
        self.space = Workspace(self.weights, limits, again, arena)
        used = again.total_bytes
        if used != state_place.offset:
            raise AssertionError(f"planned {state_place.offset} bytes, laid out {used}")
        uploader.finish()
        self.uploaded_bytes = uploader.n_bytes
        self._clear_workspace(arena, used)
        self.pool = SessionPool(
            device, s, arena.view(state_place), self.space.table, limits.checkpoints
        )
        frequencies = np.stack([s.rope_window.frequencies(), s.rope_compressed.frequencies()])
        device.upload(self.space.frequencies, frequencies)
        self._meta = device.pinned((_META_SLOTS, len(META_FIELDS), limits.max_rows), np.int32)
        self._meta[:, -1] = np.arange(limits.max_rows)
        self._meta_turn = 0
        self._tokens = device.pinned(limits.max_rows, np.int32)
        self._logits = device.pinned((limits.max_rows, s.n_vocab), np.float32)
        storage, _ = self.weights.output.places["logits"]
        self._device_logits = self.space.logits[storage]
        self.buckets = Buckets(device, self._program, self._enqueue_idle,
                               use_graphs=opts.use_graphs, overlap=opts.overlap)  # fmt: skip
        device.synchronize()

    def _clear_workspace(self, arena: Arena, end: int) -> None:
        """Zero the workspace once, so that idle rows are finite."""
        start = end - self.memory_plan.by_class["workspace"]
        piece = np.zeros(16 << 20, np.uint8)
        whole = arena.bytes_between(start, end)
        for at in range(0, end - start, piece.size):
            target = whole[at : min(at + piece.size, end - start)]
            self.device.upload(target, piece[: target.shape[0]])
        self.device.synchronize()

    def _program(self, bucket: int) -> Program:
        return Program(
            self.device, self.weights, self.space, self.pool.state, bucket,
            exact=self.options.exact, join=self.join,
        )  # fmt: skip

    def warm_up(self, buckets: tuple[int, ...] = BUCKETS) -> None:
        """Compile and capture buckets now instead of at their first step."""
        for bucket in buckets:
            self.buckets.prepare(bucket)
        self.device.synchronize()

    # -- sessions ----------------------------------------------------------------------------

    def open_session(self, session: SessionId, n_ctx: int) -> None:
        """See `StepExecutor.open_session`."""
        if session in self._sessions:
            raise ConfigError(f"session {session} is open already")
        if not 1 <= n_ctx <= self.limits.max_context:
            raise ConfigError(
                f"context must be from 1 to {self.limits.max_context} here, got {n_ctx}"
            )
        self._sessions[session] = self.pool.open(n_ctx)

    def _release(self, state: DeviceSession) -> None:
        self.pool.close(state)

    def close(self) -> None:
        """See `StepExecutor.close`."""
        self._sessions.clear()
        self.buckets.close()
        self.device.close()
        if self.file is not None:
            self.file.close()

    # -- steps -------------------------------------------------------------------------------

    def step(self, plan: StepPlan) -> StepResult:
        """See `StepExecutor.step`."""
        self.check(plan)
        passes = list(batches(plan, self.limits.max_rows))
        for batch in passes:
            # Warming a bucket up uses the same buffers, so it comes before the first row.
            self.buckets.prepare(bucket_of(sum(int(tokens.size) for _, tokens, _ in batch)))
            n_wanted = sum(len(wanted_rows(e.want, int(t.size), last)) for e, t, last in batch)
            if n_wanted:
                self.buckets.prepare(bucket_of(n_wanted))
        begin = self.device.timestamp()
        found: dict[SessionId, _Found] = {}
        for batch in passes:
            self._run(batch, found)
        for entry in plan.prefill:
            self._state(entry.session).checkpoint()
        end = self.device.timestamp()
        self.device.synchronize()
        rows = tuple(
            self._result(entry, found[entry.session])
            for entry in plan.entries()
            if entry.want != Want.NOTHING
        )
        return StepResult(
            step=plan.step,
            rows=rows,
            digest=self._digest(plan),
            device_s=self.device.seconds_between(begin, end),
        )

    def _enqueue_meta(self, fill: NDArray[np.int32]) -> None:
        """Enqueue a meta array i32[fields - 1, n]; rows past n are idle."""
        if self._meta_turn == _META_SLOTS:
            # The copies of all slots must be over before the first is written again.
            self.device.synchronize()
            self._meta_turn = 0
        host = self._meta[self._meta_turn]
        self._meta_turn += 1
        host[:-1] = 0
        host[META_FIELDS.index("slots")] = -1
        host[:-1, : fill.shape[1]] = fill
        self.device.upload(self.space.meta, host)

    def _enqueue_idle(self) -> None:
        self._enqueue_meta(np.zeros((len(META_FIELDS) - 1, 0), np.int32))

    def _run(self, batch: list[Piece], found: dict[SessionId, _Found]) -> None:
        """Enqueue one bucket, and read what its entries want."""
        n = sum(int(tokens.size) for _, tokens, _ in batch)
        fill = np.zeros((len(META_FIELDS) - 1, n), np.int32)
        wanted: list[int] = []
        owners: list[Chunk | Decode] = []
        first = 0
        for entry, tokens, is_last in batch:
            state = self._state(entry.session)
            last = first + int(tokens.size) - 1
            rows = slice(first, last + 1)
            fill[0, rows] = tokens
            fill[1, rows] = state.length + np.arange(tokens.size)
            fill[2, rows] = state.slot
            fill[3, rows], fill[4, rows] = first, last
            for row in wanted_rows(entry.want, int(tokens.size), is_last):
                wanted.append(first + row)
                owners.append(entry)
            state.append(tokens)
            first = last + 1
        fill[5, : len(wanted)] = wanted
        self._enqueue_meta(fill)
        self.buckets.run_forward(bucket_of(n))
        if not wanted:
            return
        bucket = bucket_of(len(wanted))
        self.buckets.run_head(bucket)
        count = len(wanted)
        self.device.download(self._tokens[:count], self.space.next_tokens[:count])
        if any(_needs_logits(entry) for entry in owners):
            self.device.download(self._logits[:count], self._device_logits[:count])
        self.device.synchronize()
        for i, entry in enumerate(owners):
            place = found.setdefault(entry.session, _Found())
            place.token = int(self._tokens[i])
            if _needs_logits(entry):
                place.logits.append(self._logits[i].copy())

    def _result(self, entry: Chunk | Decode, found: _Found) -> RowResult:
        length = self._state(entry.session).length
        if found.token < 0:
            raise DeviceError(
                f"session {entry.session}: the logits at position {length} are not finite"
            )
        token = Token(found.token)
        if entry.sampling.temperature > 0.0:
            token = sample(found.logits[-1], entry.sampling, length)
        logits = None
        if entry.want == Want.TOKEN_AND_LOGITS:
            logits = found.logits[-1][None]
        elif entry.want == Want.ALL_LOGITS:
            logits = np.stack(found.logits)
        return RowResult(session=entry.session, token=token, logits=logits)


@attrs.define
class _Found:
    """What a step has read for one entry: the greedy token of its last row, and logits rows."""

    token: int = -1
    logits: list[NDArray[np.float32]] = attrs.Factory(list)


def _needs_logits(entry: Chunk | Decode) -> bool:
    return entry.want in (Want.TOKEN_AND_LOGITS, Want.ALL_LOGITS) or entry.sampling.temperature > 0
