"""The diagnostic tasks of `ds4`: they run the model and write numbers instead of an answer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import BinaryIO

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.api import Model, Session
from ds4.errors import ContextOverflow
from ds4.frontends.files import write_file
from ds4.frontends.interrupt import Interrupt
from ds4.frontends.progress import PrefillProgress
from ds4.frontends.terminal import Terminal
from ds4.model.tokenizer import Tokenizer
from ds4.sampling import GREEDY, log_softmax
from ds4.steps import Want

__all__ = [
    "Diagnostics",
    "Interrupted",
    "decode_consistency",
    "dump_all_logits",
    "dump_logits",
    "dump_logprobs",
    "perplexity",
    "token_object",
]

SOURCE = "ds4"


class Interrupted(Exception):  # noqa: N818  # what the user asked for, not an error
    """Ctrl+C ended a diagnostic; its output would be incomplete and is not written."""


@attrs.frozen(kw_only=True)
class Diagnostics:
    """What every diagnostic works with.

    Attributes:
      model: the loaded model.
      terminal: streams of the run.
      interrupt: guards the steps.
    """

    model: Model
    terminal: Terminal
    interrupt: Interrupt

    def check(self) -> None:
        """Raise `Interrupted` if Ctrl+C was pressed."""
        if self.interrupt.asked:
            raise Interrupted

    def prefill(self, session: Session, ids: Sequence[int], want: int) -> NDArray[np.float32]:
        """Feed a prompt; returns the logits wanted, f32[n, V]."""
        with PrefillProgress(self.terminal, len(ids)) as progress:
            result = session.feed(
                ids, sampling=GREEDY, want=want, progress=progress, stop=self.interrupt
            )
        if result is None or result.logits is None:
            raise Interrupted
        return result.logits


def token_object(tokenizer: Tokenizer, token: int) -> dict[str, object]:
    """JSON form of a token: id, text (lossy where it is part of a character) and exact bytes."""
    data = tokenizer.token_bytes(token)
    return {
        "id": token,
        "text": data.decode("utf-8", errors="replace"),
        "bytes": list(data),
    }


def _write_json(option: str, path: str, value: object) -> None:
    data = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    write_file(option, path, lambda file: file.write(data + b"\n"))


def dump_logprobs(
    run: Diagnostics, ids: Sequence[int], path: str, *, max_tokens: int, top_k: int
) -> None:
    """Write a greedy continuation, with the likeliest alternatives of each step, as JSON.

    Log-probabilities are the log-softmax of the unmodified logits in double precision. Stops after
    the end-of-sequence token, which is recorded, after `max_tokens`, or at the end of the context.
    """
    tokenizer = run.model.tokenizer
    steps: list[dict[str, object]] = []
    with run.interrupt.guard(), run.model.session() as session:
        logits = run.prefill(session, ids, Want.TOKEN_AND_LOGITS)[0]
        while True:
            order = np.argsort(-logits, kind="stable")[:top_k]  # ties: lower id first
            logprobs = log_softmax(logits)
            selected = int(order[0])
            steps.append(
                {
                    "step": len(steps),
                    "selected": token_object(tokenizer, selected),
                    "top_logprobs": [
                        {
                            "token": token_object(tokenizer, int(i)),
                            "logit": float(logits[i]),
                            "logprob": float(logprobs[i]),
                        }
                        for i in order
                    ],
                }
            )
            is_end = selected == tokenizer.special.eos
            if is_end or len(steps) >= max_tokens or len(session) >= session.n_ctx:
                break
            run.check()
            result = session.feed([selected], sampling=GREEDY, want=Want.TOKEN_AND_LOGITS)
            assert result is not None  # it was asked for
            assert result.logits is not None
            logits = result.logits[0]
        n_ctx = session.n_ctx
    _write_json(
        "--dump-logprobs",
        path,
        {
            "source": SOURCE,
            "prompt_tokens": len(ids),
            "ctx": n_ctx,
            "top_k": min(top_k, run.model.shape.n_vocab),
            "steps": steps,
        },
    )


def dump_logits(run: Diagnostics, ids: Sequence[int], path: str) -> None:
    """Write the logits after the last token of a prompt as JSON, every float32 exactly."""
    with run.interrupt.guard(), run.model.session() as session:
        logits = run.prefill(session, ids, Want.TOKEN_AND_LOGITS)[0]
        n_ctx = session.n_ctx
    _write_json(
        "--dump-logits",
        path,
        {
            "source": SOURCE,
            "prompt_tokens": len(ids),
            "ctx": n_ctx,
            "vocab": int(logits.size),
            "logits": logits.astype(np.float64).tolist(),
        },
    )


def dump_all_logits(run: Diagnostics, ids: Sequence[int], path: str) -> None:
    """Write the logits of every position as a NumPy archive with float32 `logits[T, V]`."""
    with run.interrupt.guard(), run.model.session() as session:
        logits = run.prefill(session, ids, Want.ALL_LOGITS)

    def write(file: BinaryIO) -> None:
        np.savez(file, logits=logits)

    write_file("--dump-logits", path, write)


def perplexity(run: Diagnostics, text: str, *, max_tokens: int) -> None:
    """Score a raw text and print the number of tokens, the mean negative log-likelihood, and e^it.

    The text follows the begin-of-sequence token. At most `max_tokens` tokens, and no more than fit
    the context, are scored.
    """
    tokenizer = run.model.tokenizer
    ids = tokenizer.encode(text, special=False)
    with run.interrupt.guard(), run.model.session() as session:
        wanted = min(len(ids), max_tokens, session.n_ctx)
        if wanted < len(ids):
            run.terminal.note(f"scoring the first {wanted} of {len(ids)} tokens")
        with PrefillProgress(run.terminal, wanted) as progress:
            scores = session.score(
                [tokenizer.special.bos, *ids[:wanted]], progress=progress, stop=run.interrupt
            )
        run.check()
    total = -math.fsum(scores.tolist())
    mean = total / len(scores)
    run.terminal.stdout.write(
        f"tokens {len(scores)}\nnll {total:.6f}\nnll_per_token {mean:.6f}\n"
        f"perplexity {math.exp(mean) if mean < 700 else math.inf:.6f}\n"
    )


def decode_consistency(run: Diagnostics, ids: Sequence[int], n_steps: int) -> bool:
    """Decode greedily, then run the same tokens as one fresh prompt and compare every logit's bits.

    Returns:
      Whether all bits agree. Prints one line per step that differs, and a summary.

    Raises:
      ContextOverflow: prompt and steps do not fit the context.
    """
    out = run.terminal.stdout
    tokens = list(ids)
    decoded: list[NDArray[np.float32]] = []
    with run.interrupt.guard():
        with run.model.session() as session:
            if len(ids) + n_steps > session.n_ctx:
                raise ContextOverflow(len(ids) + n_steps, session.n_ctx)
            logits = run.prefill(session, ids, Want.TOKEN_AND_LOGITS)[-1]
            for _ in range(n_steps):
                run.check()
                tokens.append(int(np.argmax(logits)))
                logits = run.prefill(session, tokens[-1:], Want.TOKEN_AND_LOGITS)[-1]
                decoded.append(logits)
        with run.model.session() as session:
            fresh = run.prefill(session, tokens, Want.ALL_LOGITS)[len(ids) :]
    n_different = 0
    for step, (one, two) in enumerate(zip(decoded, fresh, strict=True)):
        if one.tobytes() != two.tobytes():
            n_different += 1
            worst = float(np.abs(one.astype(np.float64) - two).max())
            same = "same" if np.argmax(one) == np.argmax(two) else "another"
            out.write(f"step {step}: logits differ by up to {worst:.3e}, {same} best token\n")
    verdict = "identical bits" if not n_different else f"{n_different} differ"
    out.write(f"decode consistency: {n_steps} steps after {len(ids)} tokens: {verdict}\n")
    return not n_different
