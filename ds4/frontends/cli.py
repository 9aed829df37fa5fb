"""The `ds4` program: one prompt, a chat, or one of the diagnostics.

`main` takes its arguments and streams and returns the exit status: 0 success, 1 the run failed,
2 the command line is wrong, 130 interrupted. Standard output carries the product only. This module
only decides what to do; each thing that can be done has a module of its own.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Literal, TextIO

from ds4.api import DEFAULT_CONTEXT, Model, ModelOptions, bundled_model
from ds4.errors import ConfigError, Ds4Error
from ds4.frontends.arguments import HelpRequested, UsageError
from ds4.frontends.environment import log_level, unknown_variables
from ds4.frontends.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from ds4.frontends.files import check_writable
from ds4.frontends.inspect import report
from ds4.frontends.options import cli_parser
from ds4.frontends.prompt import Prompt, read_prompt
from ds4.frontends.tasks import Tasks
from ds4.frontends.template_option import read_template
from ds4.frontends.terminal import Terminal, is_terminal
from ds4.frontends.trace import Trace
from ds4.frontends.world_options import (
    Terminated,
    exit_status,
    head_config,
    orderly_termination,
    preflight,
    work,
    write_report,
)
from ds4.gguf import GGUFFile
from ds4.model.deepseek4.rounding import Rounding
from ds4.model.deepseek4.tensors import load_shape
from ds4.model.tokenizer import Tokenizer
from ds4.world.config import HeadConfig

__all__ = ["entry", "main"]

_log = logging.getLogger(__name__)


def entry() -> None:
    """Console script: run on the process's own streams and exit."""
    stderr = _usable(sys.stderr, "w")
    if sys.stdout is None:  # closed by the shell; a silent success would be a lie
        stderr.write("ds4: error: standard output is closed\n")
        sys.exit(EXIT_FAILED)
    status = main(
        sys.argv[1:],
        stdin=_usable(sys.stdin, "r"),
        stdout=_usable(sys.stdout, "w"),
        stderr=stderr,
        environment=os.environ,
    )
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        # The failure has been reported; without this, the interpreter would report it again.
        os._exit(status or EXIT_FAILED)
    sys.exit(status)


def _usable(stream: TextIO | None, mode: Literal["r", "w"]) -> TextIO:
    """A stream that writes UTF-8; /dev/null in place of one that was closed by the shell."""
    if stream is None:
        return open(os.devnull, mode, encoding="utf-8")
    if mode == "w" and isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding="utf-8", errors="replace")
    return stream


def main(
    argv: Sequence[str],
    *,
    stdin: TextIO,
    stdout: TextIO,
    stderr: TextIO,
    environment: Mapping[str, str],
) -> int:
    """Run the program.

    Args:
      argv: arguments without the program's name.
      stdin: input.
      stdout: gets the product.
      stderr: gets everything else.
      environment: variables.

    Returns:
      The exit status.
    """
    terminal = Terminal(
        program="ds4", stdin=stdin, stdout=stdout, stderr=stderr, environment=environment
    )
    try:
        status = _parse_and_run(argv, terminal)
        stdout.flush()
        return status
    except UsageError as error:
        terminal.error(f"{error} (see ds4 --help)")
        return EXIT_USAGE
    except ConfigError as error:
        terminal.error(_with_option(str(error)))
        return EXIT_USAGE
    except Ds4Error as error:
        terminal.error(str(error))
        return exit_status(error)
    except FloatingPointError as error:
        terminal.error(str(error))
        return EXIT_FAILED
    except Terminated:
        return EXIT_OK  # the ranks have been stopped in order on the way here
    except MemoryError as error:
        terminal.error(f"out of memory: {error}" if str(error) else "out of memory")
        return EXIT_FAILED
    except OSError as error:
        # Files named by options have been dealt with where they are used: this is a stream.
        terminal.error(f"standard output: {error.strerror or error}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        terminal.error("interrupted")
        return EXIT_INTERRUPTED


def _parse_and_run(argv: Sequence[str], terminal: Terminal) -> int:
    parser = cli_parser()
    try:
        args = parser.parse_args(list(argv))
    except HelpRequested as request:
        terminal.stdout.write(parser.help_text(request.topic))
        return EXIT_OK
    terminal.quiet = args.quiet
    for text in unknown_variables(terminal.environment):
        terminal.warning(text)
    with terminal.logging(log_level(terminal.environment)):
        return _run(args, terminal)


_OPTION_OF_FIELD = {
    "threads": "--threads",
    "context": "--ctx",
    "backend": "--backend",
    "thinking": "--think-max",
}
"""First word of a ConfigError of the API to the option that sets the field."""


def _with_option(text: str) -> str:
    option = _OPTION_OF_FIELD.get(text.split(maxsplit=1)[0])
    return text if option is None else f"argument {option}: {text}"


def _run(args: argparse.Namespace, terminal: Terminal) -> int:
    if args.role == "worker" and not (args.inspect or args.dump_tokens):
        # A worker that cannot read its model has to tell the head.
        return work(args, terminal.environment, log_level=log_level(terminal.environment))
    # Whatever was asked for, a model that cannot be read is the first thing to say.
    file = GGUFFile.open(args.model if args.model is not None else bundled_model())
    try:
        if args.inspect:
            terminal.stdout.write(report(file, args.ctx or DEFAULT_CONTEXT))
            return EXIT_OK
        world = head_config(args, terminal.environment, log_level=log_level(terminal.environment))
        if world is not None and world.preflight_only and not args.dump_tokens:
            status, document = preflight(world)
            terminal.stdout.write(document)
            return status
        # Everything else that can be wrong with the options is said before weights are touched.
        prompt = read_prompt(args, terminal, load_shape(file).n_vocab)
        if args.dump_tokens:
            _dump_tokens(prompt, terminal, file)
            return EXIT_OK
        for option in ("dump_logprobs", "dump_logits"):
            if (path := getattr(args, option)) is not None:
                check_writable(f"--{option.replace('_', '-')}", path)
        template = read_template(args.chat_template, file) if args.chat_template else None
        with (
            Trace(args.trace) as trace,
            orderly_termination(),
            _open_model(args, terminal, file, world) as model,
        ):
            write_report(args, model)
            return Tasks(args, terminal, model, trace, template).run(prompt)
    finally:
        file.close()


def _dump_tokens(prompt: Prompt, terminal: Terminal, file: GGUFFile) -> None:
    tokenizer = Tokenizer.from_metadata(file.path, file.metadata)
    ids = prompt.ids
    if ids is None:
        ids = tokenizer.encode(prompt.require("--dump-tokens"), special=True)
    terminal.stdout.write(json.dumps(ids) + "\n")
    if is_terminal(terminal.stderr) and not terminal.quiet:
        for index, token in enumerate(ids):
            text = tokenizer.token_bytes(token).decode("utf-8", errors="backslashreplace")
            terminal.line(f"{index:>6}  {token:>6}  {text!r}")


def _open_model(
    args: argparse.Namespace, terminal: Terminal, file: GGUFFile, world: HeadConfig | None
) -> Model:
    options = ModelOptions(
        path=file.path,
        n_ctx=args.ctx or DEFAULT_CONTEXT,
        backend=args.backend,
        threads=args.threads,
        prefill_chunk=args.prefill_chunk,
        rounding=Rounding(args.activation_rounding),
        quality=args.quality,
        world=world,
    )
    model = Model.open(options, file)
    if args.ctx is not None and args.ctx > model.n_ctx:
        terminal.note(f"--ctx {args.ctx}: the model was trained for {model.n_ctx}, which is used")
    if args.quality:
        _log.debug("quality.exact backend=%s: only exact kernels are used", model.backend)
    if args.warm_weights:
        begin = time.perf_counter()
        n_bytes = model.warm_weights()
        terminal.note(f"read {n_bytes:,} bytes of weights in {time.perf_counter() - begin:.2f} s")
    return model
