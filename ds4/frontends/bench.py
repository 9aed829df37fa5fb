"""`ds4-bench`: prefill and decode rates at growing context lengths, as CSV and a plot.

`main` takes its arguments and streams and returns the exit status, as `ds4` does. Standard output
carries the CSV unless `--csv` names a file.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

import ds4
from ds4.api import Model, ModelOptions
from ds4.errors import ConfigError, Ds4Error
from ds4.executor import StepExecutor
from ds4.frontends.arguments import HelpRequested, Parser, UsageError, file_name, integer, number
from ds4.frontends.arguments import text as text_value
from ds4.frontends.bench_plot import plot_svg
from ds4.frontends.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from ds4.frontends.frontiers import Frontier, Measurement, Sweep, frontiers
from ds4.frontends.options import DEFAULT_SYSTEM, add_runtime
from ds4.model.chat import Message, ThinkingMode
from ds4.model.deepseek4.rounding import Rounding
from ds4.synthetic import open_synthetic

__all__ = ["COLUMNS", "EXTENDED_COLUMNS", "entry", "main"]

COLUMNS = (
    "ctx_tokens",
    "prefill_tokens",
    "prefill_tps",
    "gen_tokens",
    "gen_tps",
    "kvcache_bytes",
)
EXTENDED_COLUMNS = (
    "ranks",
    "parallel",
    "ttft_ms",
    "decode_p50_ms",
    "decode_p99_ms",
    "collective_ms",
    "peak_mem_bytes",
    "commit",
)
_MAX_INT = 2**31 - 1


def bench_parser() -> Parser:
    """The parser of `ds4-bench`."""
    parser = Parser(
        "ds4-bench",
        "Measure prefill and decode at growing context lengths.",
        short=("benchmark", "runtime"),
    )
    group = parser.topic("benchmark", "Benchmark")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt-file", metavar="FILE", type=file_name, help="text, tokenized once and sliced"
    )
    source.add_argument(
        "--chat-prompt-file",
        metavar="FILE",
        type=file_name,
        help="text of one user turn, rendered without thinking",
    )
    source.add_argument(
        "--synthetic",
        metavar="NAME",
        help="full-size random weights made on the CUDA device, and random tokens: deepseek4-flash",
    )
    group.add_argument(
        "-sys",
        "--system",
        metavar="TEXT",
        type=text_value,
        help=f"system text of --chat-prompt-file (default: {DEFAULT_SYSTEM})",
    )
    size = integer(1, _MAX_INT)
    group.add_argument(
        "--ctx-start", metavar="N", type=size, default=2048, help="first frontier (%(default)s)"
    )
    group.add_argument(
        "--ctx-max",
        metavar="N",
        type=size,
        default=32768,
        help="last frontier, always measured (%(default)s)",
    )
    group.add_argument(
        "--ctx-alloc",
        metavar="N",
        type=size,
        help="context of a session (default: --ctx-max + --gen-tokens + 1)",
    )
    group.add_argument(
        "--step-incr", metavar="N", type=size, default=2048, help="linear step (%(default)s)"
    )
    group.add_argument(
        "--step-mul",
        metavar="F",
        type=number(1, 1e6),
        default=1.0,
        help="above 1: the next frontier is this many times the last (%(default)g)",
    )
    group.add_argument(
        "-n",
        "--gen-tokens",
        "--tokens",
        dest="gen_tokens",
        metavar="N",
        type=integer(0, _MAX_INT),
        default=128,
        help="tokens decoded at each frontier; 0 measures prefill only (%(default)s)",
    )
    group.add_argument(
        "--sessions",
        metavar="N",
        type=integer(1, 256),
        default=1,
        help="sessions that run side by side with the same prompt (%(default)s)",
    )
    group.add_argument("--csv", metavar="FILE", type=file_name, help="where the CSV goes")
    group.add_argument(
        "--csv-extended", action="store_true", help=f"add {', '.join(EXTENDED_COLUMNS)}"
    )
    group.add_argument(
        "--plot", metavar="FILE", type=file_name, help="write both rates over context as SVG"
    )
    group.add_argument(
        "--dump-frontier-logits-dir",
        metavar="DIR",
        type=file_name,
        help="write the logits at every frontier as JSON into a folder",
    )
    group.add_argument(
        "--show-output", action="store_true", help="decoded tokens on standard error"
    )
    add_runtime(parser)
    return parser


def entry() -> None:
    """Console script: run on the process's own streams and exit."""
    sys.exit(main(sys.argv[1:], stdout=sys.stdout, stderr=sys.stderr, environment=os.environ))


def main(
    argv: Sequence[str], *, stdout: TextIO, stderr: TextIO, environment: Mapping[str, str]
) -> int:
    """Run the program; see `ds4.frontends.cli.main`."""
    parser = bench_parser()
    try:
        args = parser.parse_args(list(argv))
        _check(args)
        return _run(args, stdout, stderr, environment)
    except HelpRequested as request:
        stdout.write(parser.help_text(request.topic))
        return EXIT_OK
    except UsageError as error:
        stderr.write(f"ds4-bench: {error} (see ds4-bench --help)\n")
        return EXIT_USAGE
    except ConfigError as error:
        stderr.write(f"ds4-bench: {error}\n")
        return EXIT_USAGE
    except Ds4Error as error:
        stderr.write(f"ds4-bench: {error}\n")
        return EXIT_FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        stderr.write(f"ds4-bench: {where}{error.strerror or error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        stderr.write("ds4-bench: interrupted\n")
        return EXIT_INTERRUPTED


def _check(args: argparse.Namespace) -> None:
    """Refuse combinations that cannot be meant; fill what is derived."""
    if args.ctx is not None:
        raise UsageError("argument --ctx: ds4-bench sizes the context by --ctx-alloc")
    if args.prompt_file is None and args.chat_prompt_file is None and args.synthetic is None:
        raise UsageError("one of --prompt-file, --chat-prompt-file and --synthetic is needed")
    if args.synthetic is not None and args.model is not None:
        raise UsageError("argument --synthetic: not with --model, it makes its own weights")
    if args.synthetic is not None and args.backend == "cpu":
        raise UsageError("argument --synthetic: makes its weights on a CUDA device, not with cpu")
    if args.system is not None and args.chat_prompt_file is None:
        raise UsageError("argument --system: only with --chat-prompt-file")
    if args.synthetic is not None and args.show_output:
        raise UsageError("argument --show-output: a synthetic model has no tokenizer")
    needed = args.ctx_max + args.gen_tokens
    if args.ctx_alloc is None:
        args.ctx_alloc = needed + 1
    if args.ctx_alloc <= needed:
        raise UsageError(
            f"argument --ctx-alloc: must exceed --ctx-max + --gen-tokens = {needed}, "
            f"got {args.ctx_alloc}"
        )
    args.frontiers = frontiers(
        args.ctx_start, args.ctx_max, increment=args.step_incr, factor=args.step_mul
    )


def _run(
    args: argparse.Namespace, stdout: TextIO, stderr: TextIO, environment: Mapping[str, str]
) -> int:
    if args.dump_frontier_logits_dir is not None:
        Path(args.dump_frontier_logits_dir).mkdir(parents=True, exist_ok=True)
    with _opened(args) as opened:
        prompt = opened.prompt(args)
        if prompt.size < args.ctx_max:
            stderr.write(
                f"ds4-bench: the prompt has {prompt.size} tokens, --ctx-max is {args.ctx_max}\n"
            )
            return EXIT_FAILED
        what = Measurement(
            frontiers=args.frontiers,
            gen_tokens=args.gen_tokens,
            sessions=args.sessions,
            n_ctx=args.ctx_alloc,
            prefill_chunk=opened.prefill_chunk,
            eos=opened.eos,
            wants_logits=args.dump_frontier_logits_dir is not None,
        )
        target = nullcontext(stdout) if args.csv is None else _created(args.csv)
        rows: list[Frontier] = []
        with target as out:
            columns = COLUMNS + (EXTENDED_COLUMNS if args.csv_extended else ())
            writer = csv.DictWriter(out, columns, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            for frontier in Sweep(opened.executor, prompt, what).run():
                rows.append(frontier)
                writer.writerow(_row(frontier, args.sessions, opened, environment))
                out.flush()
                _extras(args, frontier, opened, stderr)
        if args.plot is not None:
            Path(args.plot).write_text(plot_svg(rows, args.sessions), encoding="utf-8")
    return EXIT_OK


def _created(path: str) -> TextIO:
    return Path(path).open("w", encoding="utf-8", newline="")


def _row(
    frontier: Frontier, sessions: int, opened: _Opened, environment: Mapping[str, str]
) -> dict[str, object]:
    steps = 1e3 * np.array(frontier.steps_s or (0.0,))
    ttft = 1e3 * frontier.prefill_s
    return {
        "ctx_tokens": frontier.ctx_tokens,
        "prefill_tokens": frontier.prefill_tokens,
        "prefill_tps": f"{frontier.prefill_rate(sessions):.2f}",
        "gen_tokens": frontier.gen_tokens,
        "gen_tps": f"{frontier.decode_rate(sessions):.2f}",
        "kvcache_bytes": frontier.kv_bytes,
        "ranks": 1,
        "parallel": "none",
        "ttft_ms": f"{ttft:.2f}",
        "decode_p50_ms": f"{np.percentile(steps, 50):.3f}",
        "decode_p99_ms": f"{np.percentile(steps, 99):.3f}",
        "collective_ms": "0.00",
        "peak_mem_bytes": opened.peak_bytes(),
        "commit": environment.get("DS4_COMMIT", f"v{ds4.__version__}"),
    }


def _extras(args: argparse.Namespace, frontier: Frontier, opened: _Opened, stderr: TextIO) -> None:
    if frontier.logits is not None:
        path = Path(args.dump_frontier_logits_dir) / f"frontier-{frontier.ctx_tokens}.json"
        content = {
            "ctx_tokens": frontier.ctx_tokens,
            "logits": [float(x) for x in frontier.logits],
        }
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    if args.show_output and opened.model is not None:
        data = b"".join(opened.model.tokenizer.token_bytes(t) for t in frontier.tokens)
        text = data.decode("utf-8", errors="replace")
        stderr.write(f"{frontier.ctx_tokens}: {text!r}\n")
    elif not args.quiet:
        stderr.write(
            f"{frontier.ctx_tokens:>8} tokens  prefill {frontier.prefill_rate(args.sessions):.1f} "
            f"t/s  decode {frontier.decode_rate(args.sessions):.1f} t/s\n"
        )


class _Opened:
    """An executor with what the measurement needs of its model. A context manager."""

    def __init__(
        self,
        executor: StepExecutor,
        n_vocab: int,
        prefill_chunk: int,
        eos: int,
        model: Model | None,
    ) -> None:
        self.executor = executor
        self.n_vocab = n_vocab
        self.prefill_chunk = prefill_chunk
        self.eos = eos
        self.model = model

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        if self.model is not None:
            self.model.close()
        else:
            self.executor.close()

    def prompt(self, args: argparse.Namespace) -> NDArray[np.int32]:
        """Ids of the prompt, i32[n]."""
        if self.model is None:
            rng = np.random.default_rng(0)
            return np.asarray(rng.integers(0, self.n_vocab, args.ctx_max), np.int32)
        path = args.prompt_file or args.chat_prompt_file
        content = Path(path).read_text(encoding="utf-8")
        if args.prompt_file is not None:
            ids = self.model.tokenizer.encode(content, special=False)
        else:
            messages = [Message(role="user", content=content)]
            system = DEFAULT_SYSTEM if args.system is None else args.system
            if system:
                messages.insert(0, Message(role="system", content=system))
            ids = self.model.chat.render(messages, mode=ThinkingMode.NONE)
        return np.array(ids, np.int32)

    def peak_bytes(self) -> int:
        """Device memory of a CUDA executor, else the process's largest resident size."""
        plan: Any = getattr(self.executor, "memory_plan", None)
        if plan is not None:
            return int(plan.total_bytes)
        import resource

        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def _opened(args: argparse.Namespace) -> _Opened:
    if args.synthetic is None:
        model = Model.open(
            ModelOptions(
                path=args.model,
                n_ctx=args.ctx_alloc,
                backend=args.backend,
                threads=args.threads,
                prefill_chunk=args.prefill_chunk,
                rounding=Rounding(args.activation_rounding),
                quality=args.quality,
            )
        )
        if args.warm_weights:
            model.warm_weights()
        special = model.tokenizer.special
        return _Opened(model.executor, model.shape.n_vocab, model.prefill_chunk, special.eos, model)
    begin = time.perf_counter()
    made = open_synthetic(
        args.synthetic, n_ctx=args.ctx_alloc, sessions=args.sessions, quality=args.quality
    )
    if not args.quiet:
        sys.stderr.write(
            f"{args.synthetic}: {made.plan}, ready in {time.perf_counter() - begin:.1f} s\n"
        )
    return _Opened(made.executor, made.n_vocab, args.prefill_chunk, 1, None)
