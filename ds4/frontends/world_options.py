"""Options of a model that runs on several ranks, and what they start.

Every program that runs a model has them. A worker takes the same ones: it ignores what only a head
can use and refuses what would make it another world.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ds4.api import DEFAULT_CONTEXT, Model, bundled_model
from ds4.errors import ConfigError, Ds4Error, WorldRefused
from ds4.frontends.arguments import Parser, UsageError, file_name, integer, number, text
from ds4.gguf import GGUFFile
from ds4.model.deepseek4.rounding import Rounding
from ds4.world.config import TRANSPORTS, HeadConfig, RankConfig, RunConfig
from ds4.world.exit_codes import ExitCode, exit_code_of
from ds4.world.refusals import ROLES, WorldRequest, check_request
from ds4.world.timeouts import Timeouts

__all__ = [
    "TIMEOUT_VARIABLE",
    "Terminated",
    "add_world_options",
    "exit_status",
    "head_config",
    "orderly_termination",
    "preflight",
    "work",
    "world_request",
    "write_report",
]

TIMEOUT_VARIABLE = "DS4_TP_TIMEOUT_SEC"
_MAX_PORT = 65535
_LONGEST_S = 86400.0
_MODE = "it divides the model in another way"

_FOREIGN: Mapping[str, str] = {
    "--layers": f"{_MODE}; the mode decides what each rank holds",
    "--dist-prefill-chunk": f"{_MODE}; use --prefill-chunk",
    "--dist-prefill-window": _MODE,
    "--dist-activation-bits": _MODE,
    "--dist-replay-check": _MODE,
    "--mtp": "draft models are not mirrored on all ranks",
    "--dspark": "draft models are not mirrored on all ranks",
    "--glm-mtp": "draft blocks are not mirrored on all ranks",
    "--dir-steering-file": "steering vectors are not mirrored on all ranks",
    "--ssd-streaming": "every rank keeps its slice resident",
    "--cuda-tensor-parallel": f"{_MODE}; one GPU for each rank is used",
    "--gpu-vram": "one GPU for each rank is used; choose it by CUDA_VISIBLE_DEVICES",
    "--gpu-devices": "one GPU for each rank is used; choose it by CUDA_VISIBLE_DEVICES",
}
"""Options of other ways to run a model, and why they do not go with ranks."""


class _Foreign(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        given = [*getattr(namespace, self.dest, ()), str(option_string)]
        setattr(namespace, self.dest, given)


class Terminated(KeyboardInterrupt):
    """SIGTERM: end in order."""


def add_world_options(parser: Parser) -> None:
    """Add the options of a world of ranks."""
    group = parser.topic("distributed", "Several ranks")
    group.add_argument(
        "--expert-parallel",
        action="store_true",
        help="divide the routed experts among ranks",
    )
    group.add_argument(
        "--tensor-parallel",
        action="store_true",
        help="divide experts, attention and vocabulary among ranks",
    )
    group.add_argument(
        "--tensor-parallel-world",
        "--expert-parallel-world",
        dest="world",
        metavar="N",
        type=integer(1, 2**31 - 1),
        help="number of ranks: 2, 4 or 8, whichever the mode (default: 2). Every world gives the"
        " same tokens. Without --role, all ranks are started on this machine",
    )
    group.add_argument(
        "--role",
        choices=ROLES,
        default="none",
        metavar="ROLE",
        help="coordinator takes ranks from other machines, worker is one of them (default: none)",
    )
    group.add_argument(
        "--tensor-parallel-rank",
        "--expert-parallel-rank",
        dest="rank",
        metavar="R",
        type=integer(0, 2**31 - 1),
        help="which rank a worker is, 1 to N-1; may be left out when N is 2",
    )
    for name, what in (
        ("--listen", "where a coordinator takes its workers' connections"),
        ("--coordinator", "where a worker finds its coordinator"),
    ):
        group.add_argument(name, nargs=2, metavar=("HOST", "PORT"), type=text, help=what)
    group.add_argument(
        "--cluster-key-file",
        metavar="FILE",
        type=file_name,
        help="secret that all ranks must hold, at least 16 bytes; without one, whoever reaches the"
        " port can join. Ranks that are all on this machine share one of their own making",
    )
    group.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default="auto",
        metavar="NAME",
        help=f"how ranks exchange data: {', '.join(TRANSPORTS)}. GPUs use nccl, CPUs tcp (default:"
        " auto)",
    )
    group.add_argument(
        "--ep-placement",
        metavar="WHICH",
        type=file_name,
        default="contiguous",
        help="which experts are added together: contiguous, balanced, or a placement file"
        " (default: contiguous)",
    )
    group.add_argument(
        "--rank-timeout",
        metavar="SEC",
        type=number(1, _LONGEST_S),
        help="silence after which a rank is lost (default: 10)",
    )
    group.add_argument(
        "--preflight-only",
        action="store_true",
        help="let all ranks compare what they would run, print a verdict as JSON, and exit with 0"
        " or 2 before any weight is read",
    )
    group.add_argument(
        "--world-report",
        metavar="FILE",
        type=file_name,
        help="write what every rank holds as JSON once all are ready",
    )
    for name in _FOREIGN:
        group.add_argument(
            name, dest="foreign", nargs="?", action=_Foreign, default=[], help=argparse.SUPPRESS
        )


def _address(option: str, value: Sequence[str] | None) -> tuple[str, int] | None:
    if value is None:
        return None
    host, port = value
    if not port.isascii() or not port.isdigit() or not 0 <= int(port[:6]) <= _MAX_PORT:
        raise UsageError(f"argument {option}: expected a port, 0 to {_MAX_PORT}, got {port!r}")
    return host, int(port)


def world_request(args: argparse.Namespace, *, needs_context: bool = False) -> WorldRequest:
    """What a command line asks for, checked.

    Args:
      args: parsed by a parser with `add_world_options` and `add_runtime`.
      needs_context: whether this program otherwise derives the context from the machine.

    Raises:
      WorldRefused: it cannot become a world.
      UsageError: an address is malformed, or an option needs ranks and there are none.
    """
    request = WorldRequest(
        role=args.role,
        expert_parallel=args.expert_parallel,
        tensor_parallel=args.tensor_parallel,
        world=args.world,
        rank=args.rank,
        listen=_address("--listen", args.listen),
        coordinator=_address("--coordinator", args.coordinator),
        transport=args.transport,
        backend=args.backend,
        foreign=tuple((option, _FOREIGN[option]) for option in args.foreign),
        has_context=args.ctx is not None,
        needs_context=needs_context,
    )
    if request.foreign and not request.is_networked:
        raise UsageError(f"argument {request.foreign[0][0]}: this build does not have it")
    check_request(request)
    if not request.is_networked:
        # A world of one has none of this; an option that would do nothing is a mistake.
        for option, is_given in (
            ("--preflight-only", args.preflight_only),
            ("--world-report", args.world_report is not None),
            ("--rank-timeout", args.rank_timeout is not None),
            ("--cluster-key-file", args.cluster_key_file is not None),
            ("--transport", args.transport != "auto"),
            ("--ep-placement", args.ep_placement != "contiguous"),
            ("--tensor-parallel-rank", args.rank is not None),
        ):
            if is_given:
                raise UsageError(f"argument {option}: needs --expert-parallel or --tensor-parallel")
    return request


def _timeouts(args: argparse.Namespace, environment: Mapping[str, str]) -> Timeouts:
    timeouts = Timeouts.with_rank_timeout(args.rank_timeout)
    value = environment.get(TIMEOUT_VARIABLE)
    if value is None:
        return timeouts
    try:
        return timeouts.with_dial(number(1, _LONGEST_S)(value))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"environment variable {TIMEOUT_VARIABLE}: {error}") from None


def _key(args: argparse.Namespace) -> bytes | None:
    if args.cluster_key_file is None:
        return None
    from ds4.protocol.membership import ClusterKey

    try:
        key = Path(args.cluster_key_file).read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(
            f"--cluster-key-file {args.cluster_key_file}: {error.strerror or error}"
        ) from error
    ClusterKey(key)  # says what is wrong with it
    return key


def _run_config(args: argparse.Namespace, request: WorldRequest) -> RunConfig:
    return RunConfig(
        model=str(args.model if args.model is not None else bundled_model()),
        mode=request.mode,
        world=request.n_ranks,
        n_ctx=args.ctx or DEFAULT_CONTEXT,
        prefill_chunk=args.prefill_chunk,
        placement=args.ep_placement,
        backend=args.backend,
        transport=args.transport,
        rounding=Rounding(args.activation_rounding),
    )


def head_config(
    args: argparse.Namespace, environment: Mapping[str, str], *, log_level: int = logging.WARNING
) -> HeadConfig | None:
    """How to form the world that a command line asks for; None when it asks for none.

    Raises:
      WorldRefused, ConfigError: as `world_request`, or the key file is of no use.
    """
    request = world_request(args)
    if not request.is_networked:
        return None
    # A mode with one rank is a world too: its placement and its report are not to be dropped.
    return HeadConfig(
        run=_run_config(args, request),
        listen=request.listen or ("127.0.0.1", 0),
        remote=request.role == "coordinator",
        key=_key(args),
        threads=args.threads,
        timeouts=_timeouts(args, environment),
        preflight_only=args.preflight_only,
        log_level=log_level,
    )


def work(
    args: argparse.Namespace, environment: Mapping[str, str], *, log_level: int = logging.WARNING
) -> int:
    """Be a worker until its world ends; returns the exit status.

    Raises:
      WorldRefused, ConfigError: as `world_request`, or the key file is of no use.
    """
    request = world_request(args)
    from ds4.rank import run_rank

    if request.coordinator is None:  # refused before; for the type checker
        raise UsageError("argument --coordinator: needed by a worker")
    ending = run_rank(
        RankConfig(
            run=_run_config(args, request),
            rank=request.worker_rank,
            address=request.coordinator,
            key=_key(args),
            threads=args.threads,
            timeouts=_timeouts(args, environment),
            log_level=log_level,
        )
    )
    return int(ending.code)


def preflight(config: HeadConfig) -> tuple[int, str]:
    """Exit status and JSON of a preflight: one verdict for each rank."""
    from ds4.world.executor import WorldExecutor
    from ds4.world.identity import Identity

    status, refusal = ExitCode.CLEAN, None
    members: dict[int, dict[str, object]] = {}
    try:
        with GGUFFile.open(config.run.model) as file:
            identity = Identity.of(file, config.run)
        executor = WorldExecutor(config, identity)
        for rank, peer in executor.world.head.peers.items():
            hello = peer.hello
            members[rank] = {"host": hello.host, "pid": hello.pid, "device": dict(hello.device)}
        executor.close()
    except Ds4Error as error:
        status = exit_code_of(error)
        reason = error.reason if isinstance(error, WorldRefused) else error.code
        refusal = {"reason": reason, "text": str(error)}
    verdict = "refused" if refusal else "admitted"
    ranks = [
        {"rank": rank, "verdict": verdict, **members.get(rank, {}), **(refusal or {})}
        for rank in range(config.run.world)
    ]
    document = {"verdict": verdict, "world": config.run.world, "ranks": ranks}
    return int(status), json.dumps(document, indent=2) + "\n"


def write_report(args: argparse.Namespace, model: Model) -> None:
    """Write `--world-report`, if it was asked for.

    Raises:
      ConfigError: the file cannot be written.
    """
    report = getattr(model.executor, "report", None)
    if args.world_report is not None and report is not None:
        report.write(args.world_report)


def exit_status(error: Ds4Error) -> int:
    """Exit status of a program that an error ends."""
    return int(exit_code_of(error))


@contextmanager
def orderly_termination() -> Iterator[None]:
    """Within the block, SIGTERM raises `Terminated`, so that a world is drained on the way out.

    Only in the main thread, which alone gets signals; elsewhere the block is left as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
