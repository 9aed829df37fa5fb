"""Options that several programs share, one function for each help topic, and those of `ds4`.

argparse's own `parents=` loses the titles of groups that hold exclusive options, so the shared
parts are functions that add to a parser.
"""

from __future__ import annotations

import argparse

from ds4.api import BACKENDS, DEFAULT_CONTEXT, DEFAULT_PREFILL_CHUNK, DEFAULT_SAMPLING
from ds4.frontends.arguments import Parser, file_name, integer, number, text
from ds4.frontends.commands import COMMANDS_HELP
from ds4.frontends.environment import KNOWN
from ds4.frontends.world_options import add_world_options

__all__ = [
    "DEFAULT_LOGPROBS",
    "DEFAULT_MAX_TOKENS",
    "DEFAULT_SYSTEM",
    "MAX_LOGPROBS",
    "add_runtime",
    "add_sampling",
    "add_thinking",
    "cli_parser",
]

DEFAULT_SYSTEM = "You are a helpful assistant"
DEFAULT_MAX_TOKENS = 50000
DEFAULT_LOGPROBS = 20
MAX_LOGPROBS = 128
_MAX_INT = 2**31 - 1


def add_runtime(parser: Parser, *, default_context: int = DEFAULT_CONTEXT) -> None:
    """Add the options of how a model is opened and run."""
    group = parser.topic("runtime", "Model and run")
    group.add_argument(
        "-m",
        "--model",
        metavar="FILE",
        type=file_name,
        help="GGUF file to load (default: the small model that comes with ds4)",
    )
    group.add_argument(
        "-c",
        "--ctx",
        metavar="N",
        type=integer(1, _MAX_INT),
        help=f"context of a session in tokens (default: {default_context}, or what the model was"
        " trained for if that is less)",
    )
    group.add_argument(
        "-t",
        "--threads",
        metavar="N",
        type=integer(1, 65536),
        help="CPU threads that compute (default: one for each core this process may use)",
    )
    backend = group.add_mutually_exclusive_group()
    backend.add_argument(
        "--backend",
        metavar="NAME",
        choices=BACKENDS,
        default="auto",
        help=f"{', '.join(BACKENDS)} (default: auto)",
    )
    backend.add_argument(
        "--cuda", dest="backend", action="store_const", const="cuda", help="as --backend cuda"
    )
    backend.add_argument(
        "--cpu", dest="backend", action="store_const", const="cpu", help="as --backend cpu"
    )
    group.add_argument(
        "--quality",
        action="store_true",
        help="use exact kernels only: no activation is rounded to bytes on CUDA; the CPU backend"
        " has no other kernels, so there it changes nothing",
    )
    group.add_argument(
        "--warm-weights",
        action="store_true",
        help="read every page of the weights before work starts",
    )
    group.add_argument(
        "--prefill-chunk",
        metavar="N",
        type=integer(1, _MAX_INT),
        default=DEFAULT_PREFILL_CHUNK,
        help="most prompt tokens in one step (default: %(default)s; the CPU backend takes at most"
        " 256); changes no result",
    )
    group.add_argument(
        "--activation-rounding",
        metavar="NAME",
        choices=("none", "vendor"),
        default="none",
        help="none keeps activations in float32, vendor rounds them as the model's published code"
        " does (default: none)",
    )
    group.add_argument(
        "--quiet", action="store_true", help="no progress, rates or notes on standard error"
    )
    parser.add_help_option(group)


def add_sampling(parser: Parser) -> None:
    """Add the options of how tokens are chosen."""
    group = parser.topic("sampling", "Sampling")
    default = DEFAULT_SAMPLING
    group.add_argument(
        "--temp",
        metavar="F",
        type=number(0, 100),
        default=default.temperature,
        help="temperature; 0 takes the likeliest token (default: %(default)g)",
    )
    group.add_argument(
        "--top-p",
        metavar="F",
        type=number(0, 1),
        default=default.top_p,
        help="keep the likeliest tokens up to this probability; 1 keeps all (default: %(default)g)",
    )
    group.add_argument(
        "--min-p",
        metavar="F",
        type=number(0, 1),
        default=default.min_p,
        help="drop tokens below this part of the likeliest one's probability (default:"
        " %(default)g)",
    )
    group.add_argument(
        "--top-k",
        metavar="N",
        type=integer(0, _MAX_INT),
        default=default.top_k,
        help="keep this many likeliest tokens; 0 keeps all (default: %(default)s)",
    )
    group.add_argument(
        "--seed",
        metavar="N",
        type=integer(0, 2**64 - 1),
        help="seed of the random choice (default: from the clock)",
    )


def add_thinking(parser: Parser) -> None:
    """Add the choice of thinking mode."""
    group = parser.topic("thinking", "Thinking").add_mutually_exclusive_group()
    group.add_argument(
        "--think",
        dest="thinking",
        action="store_const",
        const="think",
        default="think",
        help="reason before answering (default)",
    )
    group.add_argument(
        "--think-max",
        dest="thinking",
        action="store_const",
        const="max",
        help="reason as hard as the model can; needs a context of at least 393216 tokens, with"
        " less it is --think",
    )
    group.add_argument(
        "--nothink",
        dest="thinking",
        action="store_const",
        const="none",
        help="answer at once",
    )


def cli_parser() -> Parser:
    """The parser of `ds4`."""
    parser = Parser(
        "ds4",
        "Run one prompt, or chat when no prompt is given and standard input is a terminal.",
        short=("prompt", "runtime", "sampling", "thinking"),
    )
    _add_prompt(parser)
    add_runtime(parser)
    add_sampling(parser)
    add_thinking(parser)
    add_world_options(parser)
    _add_diagnostics(parser)
    parser.topic_text("commands", COMMANDS_HELP)
    variables = "\n".join(f"  {name:<20}  {meaning}" for name, meaning in KNOWN.items())
    parser.topic_text("diagnostics", f"Environment:\n{variables}")
    return parser


def _add_prompt(parser: Parser) -> None:
    group = parser.topic("prompt", "Prompt")
    source = group.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", type=text, help="run one prompt and exit")
    source.add_argument(
        "--prompt-file", metavar="FILE", type=file_name, help="the prompt is the text of a file"
    )
    source.add_argument(
        "--tokens-file",
        metavar="FILE",
        type=file_name,
        help="the prompt is a JSON list of token ids, taken as it is",
    )
    group.add_argument(
        "-sys",
        "--system",
        metavar="TEXT",
        type=text,
        default=DEFAULT_SYSTEM,
        help='system text; "" for none (default: %(default)s)',
    )
    group.add_argument(
        "--prefix-file",
        metavar="FILE",
        type=file_name,
        help="earlier turns: USER: and ASSISTANT: at the start of a line, in pairs",
    )
    group.add_argument(
        "--raw-prompt",
        action="store_true",
        help="continue the prompt as text: no chat markers, no system text",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        type=file_name,
        help="render with a Jinja template instead of ds4's own layout; the word model takes the"
        " template in the model file",
    )
    group.add_argument(
        "-n",
        "--tokens",
        metavar="N",
        type=integer(1),
        default=DEFAULT_MAX_TOKENS,
        help="most tokens to generate (default: %(default)s; the context also ends an answer)",
    )


def _add_diagnostics(parser: Parser) -> None:
    group = parser.topic("diagnostics", "Diagnostics")
    task = group.add_mutually_exclusive_group()
    _flag(task, "--inspect", "print what the model file holds and what it needs; runs nothing")
    _flag(
        task,
        "--dump-tokens",
        "print the prompt's token ids as a JSON list; special tokens in it are recognised",
    )
    _file(
        task,
        "--dump-logprobs",
        "write a greedy continuation with its alternatives as JSON; prints no text",
    )
    _file(
        task,
        "--dump-logits",
        "write the logits that follow the prompt as JSON; to a name that ends in .npz, or with"
        " --tokens-file to any that does not end in .json, those of every position as float32"
        " logits[T, V]",
    )
    _file(
        task,
        "--perplexity-file",
        "score a text under the model; -n bounds the number of scored tokens",
    )
    task.add_argument(
        "--decode-consistency",
        metavar="N",
        type=integer(1),
        help="compare N decode steps after the prompt with one fresh prefill, bit for bit",
    )
    group.add_argument(
        "--logprobs-top-k",
        metavar="N",
        type=integer(1),
        help=f"alternatives per step of --dump-logprobs (default: {DEFAULT_LOGPROBS}, at most"
        f" {MAX_LOGPROBS})",
    )
    _file(group, "--trace", "write prompts, sampled text and rates for people to read")


def _flag(
    group: argparse._ArgumentGroup | argparse._MutuallyExclusiveGroup, name: str, help_text: str
) -> None:
    group.add_argument(name, action="store_true", help=help_text)


def _file(
    group: argparse._ArgumentGroup | argparse._MutuallyExclusiveGroup, name: str, help_text: str
) -> None:
    group.add_argument(name, metavar="FILE", type=file_name, help=help_text)
