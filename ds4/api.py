"""The Python API: `open_model`, `Model`, `Session`. Frontends use this and nothing below it.

A `Model` is a loaded file and an executor; a `Session` is one mutable timeline of tokens on it.
Every call here is synchronous and returns at a step boundary, so a session is always consistent
between calls: stop iterating and nothing is half done.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import ConfigError, ContextOverflow, InvalidRequest, ModelFileError
from ds4.executor import StepExecutor
from ds4.gguf import GGUFFile
from ds4.ids import Position, SessionId, StepId, Token
from ds4.model.chat import ChatRenderer, Message, ThinkingMode
from ds4.model.deepseek4.rounding import Rounding
from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.model.deepseek4.tensors import expected_tensors, load_shape
from ds4.model.tokenizer import StreamDecoder, Tokenizer
from ds4.sampling import SamplingParams, log_softmax
from ds4.steps import Chunk, Decode, RowResult, StepPlan, Want

if TYPE_CHECKING:
    from ds4.world.config import HeadConfig

__all__ = [
    "BACKENDS",
    "CPU_CHUNK",
    "DEFAULT_CONTEXT",
    "DEFAULT_PREFILL_CHUNK",
    "DEFAULT_SAMPLING",
    "Model",
    "ModelOptions",
    "Progress",
    "Session",
    "bundled_model",
    "open_model",
]

BACKENDS = ("auto", "cpu", "cuda")
DEFAULT_CONTEXT = 32768
DEFAULT_PREFILL_CHUNK = 4096
AUTO_CUDA_BYTES = 1 << 30
"""Smallest file for which backend `auto` looks for a CUDA device."""
CPU_CHUNK = 256
"""Most prompt tokens in one step on the CPU, which runs no more rows at once anyway: so progress is
reported, and a stop is honoured, that often."""
DEFAULT_SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, min_p=0.05)
"""The defaults of the DeepSeek V4 family."""

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all) after every chunk of a prompt."""


def bundled_model() -> Path:
    """Path of the small trained model that comes with the package."""
    return Path(str(resources.files("ds4") / "models" / "tales.gguf"))


def _whole(name: str, value: object) -> int:
    """A whole number given as an argument; bools, floats and text are none."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ConfigError(f"{name} must be a whole number, got {value!r:.80}")
    return int(value)


def _token_ids(tokens: Sequence[int], n_vocab: int) -> list[int]:
    """The tokens as plain integers, all of the vocabulary.

    Raises:
      InvalidRequest: names the first one that is no id.
    """
    for index, token in enumerate(tokens):
        is_id = isinstance(token, (int, np.integer)) and not isinstance(token, bool)
        if not (is_id and 0 <= token < n_vocab):
            raise InvalidRequest(
                f"token ids must be whole numbers from 0 to {n_vocab - 1}, "
                f"item {index} is {token!r:.80}"
            )
    return [int(token) for token in tokens]


@attrs.frozen(kw_only=True)
class ModelOptions:
    """How a model is opened.

    Attributes:
      path: a GGUF file; None means the bundled model.
      n_ctx: default context of its sessions in tokens; capped by what the model was trained for.
      backend: `auto`, `cpu` or `cuda`.
      threads: CPU worker threads; None takes every core this process may use.
      prefill_chunk: most prompt tokens in one step.
      rounding: activation rounding switch.
      quality: exact kernels only: float32 activations in every product. The CPU backend has no
        others; CUDA otherwise multiplies packed weights with activations rounded to bytes.
      world: ranks that run the model; None runs it in this process.
    """

    path: str | os.PathLike[str] | None = None
    n_ctx: int = DEFAULT_CONTEXT
    backend: str = "auto"
    threads: int | None = None
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    rounding: Rounding = Rounding.NONE
    quality: bool = False
    world: HeadConfig | None = None

    def __attrs_post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")
        for name in ("n_ctx", "prefill_chunk"):
            if _whole(name, getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.threads is not None:
            _whole("threads", self.threads)


def open_model(
    path: str | os.PathLike[str] | None = None,
    *,
    n_ctx: int = DEFAULT_CONTEXT,
    backend: str = "auto",
    threads: int | None = None,
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
    activation_rounding: str = "none",
    quality: bool = False,
) -> Model:
    """Open a model file, or the bundled model.

    Args:
      path: a GGUF file; None means the bundled model.
      n_ctx: default context of sessions; capped by what the model was trained for.
      backend: `auto`, `cpu` or `cuda`.
      threads: CPU worker threads; None takes every core this process may use.
      prefill_chunk: most prompt tokens in one step. No influence on results.
      activation_rounding: `none` (float32 activations) or `vendor`.
      quality: exact kernels only; matters on CUDA.

    Raises:
      ModelFileError: the file cannot be used; names what is wrong with it.
      ConfigError: an argument is out of range.
    """
    try:
        rounding = Rounding(activation_rounding)
    except ValueError:
        choices = ", ".join(r.value for r in Rounding)
        raise ConfigError(
            f"activation_rounding must be one of {choices}, got {activation_rounding!r}"
        ) from None
    options = ModelOptions(
        path=path,
        n_ctx=n_ctx,
        backend=backend,
        threads=threads,
        prefill_chunk=prefill_chunk,
        rounding=rounding,
        quality=quality,
    )
    return Model.open(options)


class Model:
    """A loaded model. Use as a context manager, or call `close`.

    Attributes:
      options: as opened.
      path: of the file.
      shape: sizes and constants.
      tokenizer: text to ids and back.
      chat: conversations to ids.
      backend: the backend that runs it: `cpu` or `cuda`.
      prefill_chunk: most prompt tokens in one step.
      is_closed: whether `close` was called.
    """

    def __init__(
        self,
        options: ModelOptions,
        file: GGUFFile,
        executor: StepExecutor,
        tokenizer: Tokenizer,
        backend: str = "cpu",
    ) -> None:
        self.options = options
        self.file = file
        self.path = file.path
        self.shape: DeepSeek4Shape = load_shape(file)
        self.tokenizer = tokenizer
        self.chat = ChatRenderer.from_metadata(tokenizer, file.metadata)
        self.executor = executor
        self.backend = backend
        limit = CPU_CHUNK if backend == "cpu" else options.prefill_chunk
        self.prefill_chunk = min(options.prefill_chunk, limit)
        self.is_closed = False
        self.steps = itertools.count(1)
        self._ids = itertools.count(1)

    @classmethod
    def open(cls, options: ModelOptions, file: GGUFFile | None = None) -> Self:
        """Open a model; see `open_model`.

        Args:
          options: how.
          file: the file, if the caller has opened it already; the model closes it, also when
            opening fails.
        """
        if file is None:
            file = GGUFFile.open(options.path if options.path is not None else bundled_model())
        try:
            if options.n_ctx < 1:
                raise ConfigError(f"n_ctx must be at least 1, got {options.n_ctx}")
            tokenizer = Tokenizer.from_metadata(file.path, file.metadata)
            shape = load_shape(file)
            if tokenizer.n_vocab != shape.n_vocab:
                raise ModelFileError(
                    file.path,
                    "key tokenizer.ggml.tokens",
                    expected=f"{shape.n_vocab} tokens, as the embedding has rows",
                    found=tokenizer.n_vocab,
                )
            backend = _backend(options, file)
            n_ctx = min(options.n_ctx, shape.n_ctx_train)
            return cls(options, file, _executor(options, file, backend, n_ctx), tokenizer, backend)
        except BaseException:
            file.close()
            raise

    @property
    def n_ctx(self) -> int:
        """Context a session gets unless it asks for another."""
        return min(self.options.n_ctx, self.shape.n_ctx_train)

    def session(self, n_ctx: int | None = None) -> Session:
        """Open an empty timeline of `n_ctx` tokens (default: the model's option).

        Raises:
          ConfigError: `n_ctx` is no whole number from 1 to what the model was trained for.
          InvalidRequest: the model is closed.
        """
        self._check_open()
        return Session(
            self,
            SessionId(next(self._ids)),
            self.n_ctx if n_ctx is None else _whole("n_ctx", n_ctx),
        )

    def _check_open(self) -> None:
        if self.is_closed:
            raise InvalidRequest(f"the model {self.path} is closed")

    def warm_weights(self) -> int:
        """Read one byte of every page of the weights, so that no step waits for the disk.

        Returns:
          Bytes of the tensors read. Tensors that the model does not use are left alone.

        Raises:
          InvalidRequest: the model is closed.
        """
        self._check_open()
        total = 0
        for name in expected_tensors(self.shape):
            if name in self.file.tensors:
                data = self.file.rows(name).reshape(-1)
                data[:: mmap.PAGESIZE].max()
                data[-1:].max()
                total += int(data.size)
        return total

    def warm_up(self) -> None:
        """Load or compile the backend's kernels now, by a prompt and a decoded token, thrown away.

        Nothing depends on it; whoever measures time calls it first.
        """
        token = self.tokenizer.special.bos
        with self.session(min(8, self.n_ctx)) as session:
            for tokens in ([token] * 2, [token]):
                if len(session) + len(tokens) <= session.n_ctx:
                    session.feed(tokens)

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = 256,
        sampling: SamplingParams = DEFAULT_SAMPLING,
        raw: bool = False,
        mode: ThinkingMode | None = ThinkingMode.NONE,
    ) -> Iterator[str]:
        """Answer one prompt in a session of its own; yields text as it becomes complete.

        Args:
          prompt: a user's turn, or with `raw` the text to continue.
          max_tokens: most tokens to generate; the end-of-sequence token ends it sooner.
          sampling: how tokens are chosen.
          raw: no chat markers around the prompt.
          mode: thinking mode of the turn; None is the model's default.

        Raises:
          ContextOverflow: the prompt does not fit.
        """
        if raw:
            ids = [self.tokenizer.special.bos, *self.tokenizer.encode(prompt, special=False)]
        else:
            ids = self.chat.render([Message(role="user", content=prompt)], mode=mode)
        decoder = StreamDecoder(self.tokenizer)
        with self.session() as session:
            for token in session.generate(ids, max_tokens=max_tokens, sampling=sampling):
                if token == self.tokenizer.special.eos:
                    break
                if piece := decoder.feed(token):
                    yield piece
        if rest := decoder.flush():
            yield rest

    def close(self) -> None:
        """Free the model and its sessions, which cannot be used any more. Safe to call twice."""
        self.is_closed = True
        self.executor.close()
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _backend(options: ModelOptions, file: GGUFFile) -> str:
    """The backend that `auto` means: cuda for large models where a device can be used, else cpu.

    CUDA kernels are compiled at start, which takes longer than a small model's whole answer.
    """
    if options.world is not None:
        return "cuda" if options.world.run.backend == "cuda" else "cpu"
    if options.backend != "auto":
        return options.backend
    if file.file_bytes < AUTO_CUDA_BYTES or options.rounding is not Rounding.NONE:
        return "cpu"
    from ds4.cuda.device import is_available

    return "cuda" if is_available() else "cpu"


def _executor(options: ModelOptions, file: GGUFFile, backend: str, n_ctx: int) -> StepExecutor:
    if options.world is not None:
        # Trio and the protocol are imported only where there are ranks.
        from ds4.world.executor import WorldExecutor
        from ds4.world.identity import Identity

        return WorldExecutor(options.world, Identity.of(file, options.world.run))
    # Numba is imported only when a model is really run.
    if backend == "cuda":
        # The device first: what is missing must be said before any kernel module is imported.
        from ds4.cuda.device import require_packages

        require_packages()
        from ds4.cuda.executor import CudaExecutor, CudaOptions

        return CudaExecutor.from_file(
            file,
            options=CudaOptions(max_context=n_ctx, exact=options.quality),
            rounding=options.rounding,
        )
    from ds4.cpu.executor import CpuExecutor

    return CpuExecutor(file, rounding=options.rounding, threads=options.threads)


class Session:
    """One timeline of tokens. Use as a context manager, or call `close`.

    Args:
      model: the loaded model.
      session: id on its executor.
      n_ctx: tokens the timeline can hold.
    """

    def __init__(self, model: Model, session: SessionId, n_ctx: int) -> None:
        self.model = model
        self.id = session
        self.n_ctx = n_ctx
        self.tokens: list[int] = []
        self._open = True
        model.executor.open_session(session, n_ctx)

    def __len__(self) -> int:
        return len(self.tokens)

    def feed(
        self,
        tokens: Sequence[int],
        *,
        sampling: SamplingParams = DEFAULT_SAMPLING,
        want: int = Want.TOKEN,
        progress: Progress | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> RowResult | None:
        """Append tokens and sample what follows them.

        Args:
          tokens: ids; one is a decode step, more are a prompt, run in chunks.
          sampling: how the next token is chosen.
          want: what to return; `Want.ALL_LOGITS` returns float32[n, V] of all tokens given.
          progress: called after every chunk.
          stop: asked before every chunk; True ends early with what is done so far.

        Returns:
          The sampled token, not yet appended, and logits if wanted; None when stopped early.

        Raises:
          ContextOverflow: the tokens do not fit; nothing is appended.
          InvalidRequest: no tokens, or an item that is no id of the vocabulary; nothing is
            appended.
          FloatingPointError: the logits are not finite; the tokens they follow are appended.
        """
        if len(self.tokens) + len(tokens) > self.n_ctx:
            raise ContextOverflow(len(self.tokens) + len(tokens), self.n_ctx)
        if not len(tokens):
            raise InvalidRequest("at least one token must be fed")
        tokens = _token_ids(tokens, self.model.shape.n_vocab)
        if len(tokens) == 1:
            return self._decode(Token(tokens[0]), sampling, want)
        pieces: list[NDArray[np.float32]] = []
        result: RowResult | None = None
        chunk = self.model.prefill_chunk
        inner = want if want == Want.ALL_LOGITS else Want.NOTHING
        for at in range(0, len(tokens), chunk):
            if stop is not None and stop():
                return None
            part = tokens[at : at + chunk]
            is_last = at + chunk >= len(tokens)
            entry = Chunk(
                session=self.id,
                start=Position(len(self.tokens)),
                tokens=part,
                want=want if is_last else inner,
                sampling=sampling,
            )
            rows = self._step(part, StepPlan(step=self._next_step(), prefill=(entry,)))
            if rows:
                result = rows[0]
                if result.logits is not None:
                    pieces.append(result.logits)
            if progress is not None:
                progress(at + len(part), len(tokens))
        if result is not None and len(pieces) > 1:
            result = attrs.evolve(result, logits=np.concatenate(pieces))
        return result

    def _decode(self, token: Token, sampling: SamplingParams, want: int) -> RowResult | None:
        entry = Decode(
            session=self.id,
            position=Position(len(self.tokens)),
            token=token,
            want=want,
            sampling=sampling,
        )
        rows = self._step([token], StepPlan(step=self._next_step(), decode=(entry,)))
        return rows[0] if rows else None

    def _next_step(self) -> StepId:
        return StepId(next(self.model.steps))

    def _step(self, tokens: Sequence[int], plan: StepPlan) -> tuple[RowResult, ...]:
        try:
            rows = self.model.executor.step(plan).rows
        except FloatingPointError:
            # Sampling failed, not the pass before it: the executor holds the tokens.
            self.tokens.extend(tokens)
            raise
        self.tokens.extend(tokens)
        return rows

    def generate(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingParams = DEFAULT_SAMPLING,
        progress: Progress | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[Token]:
        """Feed tokens, then yield sampled ones, up to and including end-of-sequence.

        A yielded token is appended to the timeline only when the next one is asked for. Ends after
        `max_tokens`, or when the context is full.
        """
        result = self.feed(tokens, sampling=sampling, progress=progress, stop=stop)
        for n in range(max_tokens):
            if result is None or result.token is None:
                return
            yield result.token
            is_end = result.token == self.model.tokenizer.special.eos
            if is_end or n + 1 == max_tokens or len(self.tokens) >= self.n_ctx:
                return
            if stop is not None and stop():
                return
            result = self.feed([result.token], sampling=sampling)

    def score(
        self,
        tokens: Sequence[int],
        *,
        progress: Progress | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> NDArray[np.float64]:
        """Append tokens and return how likely the model found them.

        Args:
          tokens: ids, at least two; the first is not scored, since nothing stands before it.
          progress: called after every chunk.
          stop: asked before every chunk; True ends early.

        Returns:
          f64[n - 1], the log-probability of tokens[i + 1] after tokens[:i + 1] and what the
          timeline held before; fewer when stopped early.

        Raises:
          ContextOverflow: the tokens do not fit; nothing is appended.
          InvalidRequest: fewer than two tokens, or an item that is no id; nothing is appended.
        """
        if len(tokens) < 2:
            raise InvalidRequest(f"at least two tokens are needed to score one, got {len(tokens)}")
        if len(self.tokens) + len(tokens) - 1 > self.n_ctx:
            raise ContextOverflow(len(self.tokens) + len(tokens) - 1, self.n_ctx)
        tokens = _token_ids(tokens, self.model.shape.n_vocab)
        chunk = self.model.prefill_chunk
        fed = tokens[:-1]  # nothing needs the last token's own logits
        scores: list[float] = []
        for at in range(0, len(fed), chunk):
            if stop is not None and stop():
                break
            part = fed[at : at + chunk]
            result = self.feed(part, want=Want.ALL_LOGITS)
            if result is None or result.logits is None:
                break
            for row, logits in enumerate(result.logits):
                scores.append(float(log_softmax(logits)[tokens[at + row + 1]]))
            if progress is not None:
                progress(at + len(part), len(fed))
        return np.array(scores, np.float64)

    def rewind(self, length: int) -> None:
        """Cut the timeline to its first `length` tokens, exactly as if the rest had never been.

        What the executor no longer holds exactly is computed again from the tokens.
        """
        # Anything but a whole number would fail later, half done.
        is_whole = isinstance(length, (int, np.integer)) and not isinstance(length, bool)
        if not (is_whole and 0 <= length <= len(self.tokens)):
            raise InvalidRequest(f"cannot rewind {len(self.tokens)} tokens to {length!r:.80}")
        kept = int(self.model.executor.rewind(self.id, Position(length)))
        again = self.tokens[kept:length]
        del self.tokens[kept:]
        if again:
            self.feed(again, want=Want.NOTHING)

    def snapshot(self) -> bytes:
        """Everything needed to continue exactly, for `restore` on the same model."""
        return self.model.executor.snapshot(self.id)

    def restore(self, data: bytes) -> None:
        """Replace the timeline by a snapshot.

        Raises:
          SnapshotError: damaged, of another model, or too long; the timeline is unchanged.
        """
        self.model.executor.restore(self.id, data)
        self.tokens = self.model.executor.session_tokens(self.id)

    def close(self) -> None:
        """Free the timeline. Safe to call twice, and after the model was closed."""
        if self._open and not self.model.is_closed:
            self._open = False
            self.model.executor.close_session(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
