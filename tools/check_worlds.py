"""Check that every world of local CPU ranks gives the same bits and sends the bytes it should.

usage: python tools/check_worlds.py [--worlds 1,2,4,8] [--placements ...] [--chunks 16,64]
                                    [--json OUT]

Each case is one `ds4 --dump-logits` with real rank processes. Within a placement the logits of all
positions must equal, bit for bit, those of the first case, whatever the mode, the number of ranks
and the prefill chunk. Each rank's byte counter in `--world-report`, which is taken after the
warm-up steps, must equal what the collective schedule says. Exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import attrs
import numpy as np

import ds4
from ds4.gguf import GGUFFile
from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.model.deepseek4.tensors import load_shape
from ds4.partition.collectives_model import bytes_sent, step_schedule
from ds4.partition.placement import LayerPlacement, Placement
from ds4.partition.placement_file import dump_placement
from ds4.partition.rules import Mode

PLACEMENTS = ("contiguous", "explicit", "balanced")
MODES = {"ep": Mode.EXPERT_PARALLEL, "tp": Mode.TENSOR_PARALLEL}
FLAGS = {"ep": "--expert-parallel", "tp": "--tensor-parallel"}
N_IDS = 48
SELF_TEST_BYTES = 32
"""The mesh proves itself by joining eight float32 before the first step."""
WARM_UP = ((2, 0), (1, 1))
"""(rows, logit rows) of the steps that a rank runs before it is ready: a chunk that wants nothing,
then a decode that wants a token."""
LIMIT_S = 600


@attrs.frozen(kw_only=True)
class Case:
    """One world.

    Attributes:
      placement: one of PLACEMENTS.
      mode: `ep` or `tp`.
      world: ranks.
      chunk: prompt tokens of one step.
    """

    placement: str
    mode: str
    world: int
    chunk: int


@attrs.frozen(kw_only=True)
class Found:
    """What a case gave.

    Attributes:
      case: which.
      digest: SHA-256 of the logits' bytes, shortened.
      logits: the bytes.
      sent: bytes each rank says it sent; empty in a world of one.
      expected: bytes it should have sent.
      seconds: wall time of the whole process.
      problem: why there is nothing to compare; empty when there is.
    """

    case: Case
    digest: str = ""
    logits: bytes = attrs.field(default=b"", repr=False)
    sent: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()
    seconds: float = 0.0
    problem: str = ""


class Checker:
    """Runs cases in a folder of its own.

    Args:
      model: path of the model file.
      folder: for prompt, placement and outputs.
    """

    def __init__(self, model: str, folder: Path) -> None:
        self._model = model
        self._folder = folder
        with GGUFFile.open(model) as file:
            self.shape: DeepSeek4Shape = load_shape(file)
        rng = np.random.default_rng(7)
        ids = rng.integers(3, self.shape.n_vocab, N_IDS).tolist()
        (folder / "ids.json").write_text(json.dumps(ids))
        layers = tuple(
            LayerPlacement.from_owners((rng.permutation(self.shape.n_experts) % 8).tolist())
            for _ in range(self.shape.n_layers)
        )
        (folder / "placement.json").write_text(dump_placement(Placement(layers=layers)))

    def expected_bytes(self, case: Case) -> tuple[int, ...]:
        """Bytes each rank has sent when its world is ready; empty in a world of one."""
        if case.world == 1:
            return ()
        schedules = [
            step_schedule(
                self.shape, MODES[case.mode], case.world, n_rows=rows, n_logit_rows=logit_rows
            )
            for rows, logit_rows in WARM_UP
        ]
        return tuple(
            (case.world - 1) * SELF_TEST_BYTES
            + sum(bytes_sent(schedule, case.world, rank) for schedule in schedules)
            for rank in range(case.world)
        )

    def run(self, case: Case) -> Found:
        """Run one case; what goes wrong is in `problem`."""
        out, report = self._folder / "logits.npz", self._folder / "world.json"
        for path in (out, report):
            path.unlink(missing_ok=True)
        which = case.placement
        if which == "explicit":
            which = str(self._folder / "placement.json")
        command = [
            *(sys.executable, "-m", "ds4", "-m", self._model, "-t", "1", "--ctx", "128"),
            *(FLAGS[case.mode], "--tensor-parallel-world", str(case.world)),
            *("--ep-placement", which, "--prefill-chunk", str(case.chunk)),
            *("--rank-timeout", "120", "--tokens-file", str(self._folder / "ids.json")),
            *("--dump-logits", str(out), "--world-report", str(report)),
        ]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DS4_")}
        root = str(Path(ds4.__file__).parent.parent)
        environment["PYTHONPATH"] = root
        begin = time.monotonic()
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=LIMIT_S, check=False
        )
        seconds = time.monotonic() - begin
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            return Found(case=case, seconds=seconds, problem=f"{done.returncode}: {lines[-1]}")
        logits = np.load(out)["logits"]
        if logits.shape != (N_IDS, self.shape.n_vocab) or not np.isfinite(logits).all():
            return Found(case=case, seconds=seconds, problem=f"bad logits {logits.shape}")
        ranks = json.loads(report.read_text())["ranks"]
        if [rank["rank"] for rank in ranks] != list(range(case.world)):
            return Found(case=case, seconds=seconds, problem="the report lacks ranks")
        data = logits.tobytes()
        return Found(
            case=case,
            digest=hashlib.sha256(data).hexdigest()[:16],
            logits=data,
            sent=tuple(
                int(rank["ready"]["collective_bytes_sent"]) for rank in ranks if case.world > 1
            ),
            expected=self.expected_bytes(case),
            seconds=seconds,
        )


def check(checker: Checker, cases: Sequence[Case]) -> Iterator[tuple[Found, str]]:
    """Run cases; yields each with its verdict, `ok` or what is wrong."""
    first: dict[str, Found] = {}
    for case in cases:
        found = checker.run(case)
        if found.problem:
            yield found, found.problem
            continue
        base = first.setdefault(case.placement, found)
        if found.logits != base.logits:
            yield found, f"logits differ from those of {base.case}"
        elif found.sent != found.expected or 0 in found.sent:
            yield found, f"sent {found.sent}, the schedule says {found.expected}"
        else:
            yield found, "ok"


def _commit() -> str:
    root = Path(__file__).parent.parent
    done = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Run the matrix; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default=str(ds4.bundled_model()))
    parser.add_argument("--worlds", default="1,2,4,8")
    parser.add_argument("--modes", default="ep,tp")
    parser.add_argument("--placements", default=",".join(PLACEMENTS))
    parser.add_argument("--chunks", default="16,64")
    parser.add_argument("--json", help="write the table here, after each case")
    args = parser.parse_args()
    cases = [
        Case(placement=placement, mode=mode, world=int(world), chunk=int(chunk))
        for world, placement, mode, chunk in product(
            *(text.split(",") for text in (args.worlds, args.placements, args.modes, args.chunks))
        )
    ]
    commit = _commit()
    rows: list[dict[str, object]] = []
    n_wrong = 0
    print(
        "placement  mode ranks chunk  logits            bytes sent by each rank   seconds verdict"
    )
    with tempfile.TemporaryDirectory() as folder:
        for found, verdict in check(Checker(args.model, Path(folder)), cases):
            case = found.case
            n_wrong += verdict != "ok"
            sent = " ".join(str(n) for n in sorted(set(found.sent))) or "-"
            print(
                f"{case.placement:10} {case.mode:4} {case.world:5} {case.chunk:5}"
                f"  {found.digest:16}  {sent:24} {found.seconds:8.1f} {verdict}",
                flush=True,
            )
            rows.append(
                {
                    **attrs.asdict(case),
                    "logits_sha256_16": found.digest,
                    "bytes_sent": found.sent,
                    "bytes_of_schedule": found.expected,
                    "seconds": round(found.seconds, 2),
                    "verdict": verdict,
                }
            )
            if args.json:
                document = {
                    "command": " ".join(["python", *sys.argv]),
                    "commit": commit,
                    "machine": {
                        "cpu": platform.machine(),
                        "cores": len(os.sched_getaffinity(0)),
                        "load": os.getloadavg(),
                    },
                    "model": Path(args.model).name,
                    "cases_planned": len(cases),
                    "cases_done": len(rows),
                    "wrong": n_wrong,
                    "rows": rows,
                }
                Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
    print(f"{len(rows)} worlds, {n_wrong} wrong")
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
