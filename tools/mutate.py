"""Apply known mistakes of multi-rank engines to a copy of the tree, and see that tests find them.

Each mutation is an exact replacement in one or more files and a few tests that must then fail. The
tests first run on the unchanged copy, because a test that fails anyway proves nothing.

Usage: python tools/mutate.py [--only A,D] [--output FILE]

A mutation whose old text is not in its file exactly once is an error: the table must follow the
code. Exit status: 0 all killed, 1 a mutation survived, 2 the table or its tests are wrong.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 180.0
BASELINE_TIMEOUT_S = 600.0
FAILED = 1  # pytest: tests ran and some failed


class TableError(Exception):
    """The table does not fit the tree, or a test that should kill cannot even run."""


@attrs.frozen
class Edit:
    """One exact replacement.

    Attributes:
      file: relative to the tree.
      old: occurs exactly once in it.
      new: takes its place.
    """

    file: str
    old: str
    new: str


@attrs.frozen
class Mutation:
    """A mistake and what finds it.

    Attributes:
      id: a letter, and a suffix where one mistake has several places.
      what: in words.
      edits: that make it.
      tests: pytest node ids; at least one must fail.
      simulated: the tests need Numba's CUDA simulator.
      note: where ds4 differs from the engine in which the mistake was found.
    """

    id: str
    what: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    simulated: bool = False
    note: str = ""


_PLACEMENT = "ds4/partition/placement.py"
_SHARDS = "ds4/partition/shards.py"
_TCP = "ds4/collectives/tcp.py"
_MODEL = "ds4/partition/collectives_model.py"
_RANK = "ds4/world/rank_actor.py"
_MOE = "ds4/cpu/kernels/moe.py"
_CUDA = "ds4/cuda/weights.py"
_IDENTITY = "ds4/protocol/identity.py"

_REMAP = (
    "tests/partition/test_placement.py::test_any_placement_is_a_partition_with_a_consistent_remap"
)
_JOIN = (
    "tests/collectives/test_tcp.py::"
    "test_join_is_the_canonical_tree_with_the_same_bits_on_every_rank"
)
_COMBINE = "tests/cpu/test_moe_combine.py::test_slots_of_other_ranks_do_not_enter_the_sum"
_WORLDS = (
    "tests/cpu/test_worlds.py::test_every_world_gives_the_bits_of_one_rank"
    "[2-Mode.EXPERT_PARALLEL-explicit]"
)
_ORDER = "tests/sim/test_world.py::test_the_order_of_arrival_changes_nothing"
_GATHER = (
    "tests/partition/test_collectives_model.py::"
    "test_a_gather_gives_every_contribution_in_rank_order"
)
_SUM = (
    "tests/partition/test_collectives_model.py::test_an_all_reduce_gives_the_true_sum_on_every_rank"
)
_FIELD = (
    "tests/protocol/test_identity.py::"
    "test_a_difference_in_any_one_field_is_found_hashed_and_explained"
)
_SPLIT = (
    "tests/partition/test_tensor_parallel.py::"
    "test_an_expert_parallel_rank_of_two_keeps_about_44_gib"
)
_PLAN = "tests/cuda/kernels/test_plan.py::test_the_ranks_of_a_world_plan_every_expert_once"
_LINES = "            if v0 <= v < v1:\n                at = (v - v0) * d\n"
_UNMASKED = "            if True:\n                at = (min(max(v, v0), v1 - 1) - v0) * d\n"

FIELDS = (
    "mode", "world", "gguf_bytes", "gguf_digest", "layout_fingerprint", "model_id", "n_layers",
    "width", "vocab", "n_ctx", "prefill_chunk", "max_sessions", "max_batch_rows", "mixed_quantum",
    "schedule_digest", "placement_digest", "reduce_mode", "fast_aligned", "activation_dtype",
    "transport", "nccl_version", "build_commit", "build_dirty",
)  # fmt: skip
"""Every geometry field that must be equal; mutation L leaves out each in turn."""

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "A",
        "drop the global to local remap",
        (
            Edit(
                _PLACEMENT,
                "local[list(experts)] = np.arange(len(experts), dtype=np.int32)\n        return Lo",
                "local[list(experts)] = experts\n        return Lo",
            ),
        ),
        (_REMAP,),
        note="a world with one expert a rank cannot see this, since the local index is always 0; "
        "the law is checked on placements of up to 48 experts. The CPU keeps global indices. "
        "The GPU loader builds its own remap, which no mutation here changes yet.",
    ),
    Mutation(
        "B",
        "never mask unowned slots: every rank computes and adds all",
        (
            Edit(
                "ds4/cpu/forward.py",
                "owned = (own.shard_of >= own.experts[0]) & (own.shard_of < own.experts[1])",
                "owned = np.ones_like(own.shard_of, np.bool_)",
            ),
            Edit(_MOE, _LINES, _UNMASKED),
        ),
        (_WORLDS,),
    ),
    Mutation(
        "C",
        "combine without the mask, over whatever the unowned slots hold",
        (Edit(_MOE, _LINES, _UNMASKED),),
        (_COMBINE, "tests/cpu/test_moe_combine.py::test_the_ranks_join_to_the_whole_sum"),
        note="ds4 has no masked copy of the weights that could be mixed up with the others: owned "
        "slots are compacted and their weights multiplied in; the combine has the only mask.",
    ),
    Mutation(
        "D",
        "drop one rank's partial",
        (
            Edit(
                _TCP,
                "        while len(parts) > 1:\n",
                "        parts[-1] *= len(parts) == 1\n        while len(parts) > 1:\n",
            ),
        ),
        (f"{_JOIN}[1000-2]",),
    ),
    Mutation(
        "E",
        "double-count a rank: rank r also owns the shards of the ranks before it",
        (
            Edit(
                _SHARDS,
                "return range(rank * per_rank, (rank + 1) * per_rank)",
                "return range(0, (rank + 1) * per_rank)",
            ),
        ),
        (
            "tests/partition/test_shards.py::test_ranks_own_whole_adjacent_shards",
            _REMAP,
        ),
    ),
    Mutation(
        "F",
        "gather of a single exchange",
        (
            Edit(
                _MODEL,
                "rounds = world - 1 if exchanges is None else exchanges",
                "rounds = min(1, world - 1) if exchanges is None else exchanges",
            ),
        ),
        (f"{_GATHER}[neighbour_gather-3]",),
    ),
    Mutation(
        "F.ring",
        "ring reduction of two exchanges",
        (Edit(_MODEL, "full = 2 * (world - 1)", "full = min(2, 2 * (world - 1))"),),
        (f"{_SUM}[ring_all_reduce-3]",),
    ),
    Mutation(
        "G",
        "the join returns its input",
        (Edit(_TCP, "        return parts[0]\n", "        return part\n"),),
        (f"{_JOIN}[1000-2]",),
    ),
    Mutation(
        "G.check",
        "the known-sum self-test at bootstrap accepts anything",
        (Edit(_TCP, "if not np.array_equal(found, expected):", "if False:"),),
        (
            "tests/collectives/test_self_test.py::"
            "test_a_mesh_that_returns_its_input_fails_the_self_test_on_every_rank",
        ),
    ),
    Mutation(
        "H",
        "plan all experts on every rank",
        (
            Edit(
                "ds4/partition/tensor_parallel.py",
                "experts = layer.experts_of_rank(self.world, self.rank)",
                "experts = layer.experts_of_rank(1, 0)",
            ),
        ),
        (_SPLIT,),
    ),
    Mutation(
        "H.cuda",
        "load all experts into every GPU",
        (
            Edit(
                _CUDA,
                "owned = np.flatnonzero((shard_of >= v0) & (shard_of < v1))",
                "owned = np.arange(s.n_experts)",
            ),
        ),
        (_PLAN,),
        simulated=True,
    ),
    Mutation(
        "I",
        "acknowledge before completion",
        (
            Edit(
                "ds4/world/rank_work.py",
                "result = await self._device.run(_checked_step, self._executor(), plan)",
                "trio.lowlevel.spawn_system_task(\n"
                "                self._device.run, _checked_step, self._executor(), plan\n"
                "            )\n"
                "            result = StepResult(step=plan.step, digest=bytes(16), device_s=0.0)",
            ),
            Edit(
                "ds4/world/rank_work.py",
                "import numpy as np\n",
                "import numpy as np\nimport trio\n",
            ),
        ),
        ("tests/world/test_ack_order.py::test_no_acknowledgement_before_the_device_has_completed",),
    ),
    Mutation(
        "J",
        "number the ranks by order of arrival, not by what their hello says",
        (
            Edit(
                "ds4/world/head.py",
                "self.peers[hello.rank] = peer",
                "self.peers[len(self.peers)] = peer",
            ),
        ),
        (_ORDER,),
    ),
    Mutation(
        "K",
        "accept the preface of an older major version",
        (
            Edit(
                "ds4/protocol/version.py",
                "if ours.major != theirs.major:",
                "if ours.major < theirs.major:",
            ),
        ),
        ("tests/protocol/test_version.py::test_a_stranger_is_refused_by_name",),
    ),
    Mutation(
        "K.arity",
        "accept a message with fewer fields",
        (Edit("ds4/protocol/codec.py", "if len(values) != arity:", "if len(values) > arity:"),),
        (
            "tests/protocol/test_version.py::"
            "test_a_message_has_exactly_the_fields_of_the_negotiated_minor",
        ),
    ),
    *(
        Mutation(
            f"L.{field}",
            f"do not compare {field}",
            (
                Edit(
                    _IDENTITY,
                    "_EQUAL = tuple(name for name in _FLAGS if name not in _WARN)",
                    f'_EQUAL = tuple(n for n in _FLAGS if n not in _WARN and n != "{field}")',
                ),
            ),
            (f"{_FIELD}[{field}]",),
        )
        for field in FIELDS
    ),
    Mutation(
        "M",
        "the head ignores a refusal among the answers",
        (Edit("ds4/world/verdict.py", "if acks and fails:", "if False:"),),
        ("tests/world/test_world_values.py::test_one_answer_that_differs_is_a_desynchronisation",),
    ),
    Mutation(
        "N",
        "a cancellation takes effect inside a step: what ranks computed is not recorded",
        (
            Edit(
                "ds4/scheduler.py",
                "            slot.timeline.extend(entry.tokens if",
                "            if slot.request is not None:\n"
                "                slot.timeline.extend(entry.tokens if",
            ),
        ),
        (
            "tests/test_scheduler.py::"
            "test_a_request_that_ended_in_flight_leaves_what_the_ranks_computed",
        ),
        note="a rank never hears of a cancellation, so it cannot take one from its own clock; the "
        "scheduler's record is the only place where the mistake can be made.",
    ),
    Mutation(
        "O",
        "partition off by one",
        (
            Edit(
                _SHARDS,
                "(shard + 1) * n_blocks // N_SHARDS)",
                "((shard + 1) * n_blocks + N_SHARDS - 1) // N_SHARDS)",
            ),
        ),
        ("tests/partition/test_shards.py::test_a_dimension_of_257_leaves_no_gap_and_no_overlap",),
    ),
    Mutation(
        "P",
        "the memory plan wraps at 2^64",
        (Edit("ds4/partition/memory.py", "return min(n, _LIMIT)", "return n & _LIMIT"),),
        ("tests/partition/test_memory.py::test_a_plan_beyond_64_bits_saturates_and_is_refused",),
    ),
    Mutation(
        "Q",
        "the operand guard compares the kind of device, not its ordinal",
        (
            Edit(
                "ds4/cuda/device.py",
                "if operand.ordinal != ordinal:",
                "if type(operand.ordinal) is not type(ordinal):",
            ),
        ),
        (
            "tests/cuda/test_device.py::"
            "test_an_operand_of_another_device_is_named_with_both_devices",
        ),
    ),
    Mutation(
        "R",
        "unowned slots are multiplied by zero instead of left out",
        (
            Edit(
                _MOE,
                _LINES,
                "            if not v0 <= v < v1:\n"
                "                for i in range(d):\n"
                "                    parts[i] += _ZERO * y[(r * n_used + j) * d + i]\n" + _LINES,
            ),
        ),
        (_COMBINE,),
    ),
    Mutation(
        "R.zero",
        "an empty shard starts at -0.0",
        (
            Edit(
                _SHARDS, "return np.zeros(shape, np.float32)", "return -np.zeros(shape, np.float32)"
            ),
        ),
        (
            "tests/partition/test_shards.py::"
            "test_a_shard_of_negative_zeros_and_an_empty_shard_both_give_positive_zero",
        ),
    ),
    Mutation(
        "S",
        "ranks are joined in another order",
        (
            Edit(
                _TCP,
                "np.add(parts[2 * i], parts[2 * i + 1], out=parts[i])",
                "np.add(parts[i], parts[i + len(parts) // 2], out=parts[i])",
            ),
        ),
        (f"{_JOIN}[1000-4]",),
    ),
    Mutation(
        "S.tree",
        "shards are joined in another order",
        (
            Edit(
                _SHARDS,
                "level[0::2] + level[1::2]",
                "level[: len(level) // 2] + level[len(level) // 2 :]",
            ),
        ),
        ("tests/partition/test_shards.py::test_the_tree_is_the_documented_expression",),
    ),
    Mutation(
        "T",
        "a rank lingers after the head is gone",
        (
            Edit(
                _RANK,
                "                await self._read()\n",
                "                await self._read()\n                await trio.sleep_forever()\n",
            ),
            Edit(
                _RANK,
                "            self._finish(ExitCode.LEADER_LOST, reason)\n",
                "            pass\n",
            ),
            Edit(_RANK, "if silence > self._timeouts.rank_timeout_s:", "if False:"),
        ),
        ("tests/world/test_rank_process.py::test_a_rank_does_not_outlive_its_head",),
    ),
)


@attrs.frozen
class Outcome:
    """What the tests said of a mutation; `killer` is None when it survived."""

    mutation: Mutation
    killer: str | None
    seconds: float


def apply(mutation: Mutation, tree: Path) -> dict[Path, str]:
    """Make a mutation. Returns the original texts by file.

    Raises:
      TableError: an old text is not in its file exactly once.
    """
    originals: dict[Path, str] = {}
    try:
        for edit in mutation.edits:
            path = tree / edit.file
            text = path.read_text(encoding="utf-8")
            if (n := text.count(edit.old)) != 1:
                raise TableError(f"{mutation.id}: {n} places in {edit.file} read {edit.old!r}")
            originals.setdefault(path, text)
            path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
    except TableError:
        restore(originals)
        raise
    return originals


def restore(originals: dict[Path, str]) -> None:
    """Put the texts back that `apply` returned."""
    for path, text in originals.items():
        path.write_text(text, encoding="utf-8")


def copy_tree(target: Path) -> None:
    """Copy what git tracks, and new files that it does not ignore."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(
    tree: Path, tests: tuple[str, ...], *, simulated: bool, timeout_s: float
) -> tuple[int | None, str]:
    """Run tests in a tree. Returns pytest's exit status, or None after the timeout; and its text.

    Bytecode is not written: a file changed twice in a second at one size would be taken for the
    old one.
    """
    environment = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_ENABLE_CUDASIM": "1" if simulated else "0",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        return None, text
    return process.returncode, text


def judge(mutation: Mutation, tree: Path) -> Outcome:
    """Apply a mutation, run its tests, and put the tree back.

    Raises:
      TableError: the tests could not run, so they say nothing.
    """
    begin = time.monotonic()
    originals = apply(mutation, tree)
    try:
        status, text = run_tests(
            tree, mutation.tests, simulated=mutation.simulated, timeout_s=TIMEOUT_S
        )
    finally:
        restore(originals)
    seconds = time.monotonic() - begin
    if status == 0:
        return Outcome(mutation, None, seconds)
    if status is None:
        return Outcome(mutation, f"timeout of {TIMEOUT_S:g} s", seconds)
    failed = [line for line in text.splitlines() if line.startswith("FAILED ")]
    if status != FAILED or not failed:
        raise TableError(f"{mutation.id}: pytest ended with {status}:\n{text[-2000:]}")
    return Outcome(mutation, failed[0].removeprefix("FAILED ").split(" - ")[0], seconds)


def check_baseline(mutations: list[Mutation], tree: Path) -> None:
    """Raise `TableError` unless all tests pass on the unchanged tree."""
    for simulated in (False, True):
        chosen = [m.tests for m in mutations if m.simulated is simulated]
        tests = tuple(dict.fromkeys(test for group in chosen for test in group))
        if tests:
            status, text = run_tests(tree, tests, simulated=simulated, timeout_s=BASELINE_TIMEOUT_S)
            if status != 0:
                raise TableError(f"the tests fail without a mutation ({status}):\n{text[-2000:]}")


def select(only: str | None) -> list[Mutation]:
    """The mutations named, by id or by letter; all for None.

    Raises:
      TableError: a name that is none.
    """
    if only is None:
        return list(MUTATIONS)
    names = [name.strip() for name in only.split(",")]
    known = {m.id for m in MUTATIONS} | {m.id.split(".")[0] for m in MUTATIONS}
    if unknown := [name for name in names if name not in known]:
        raise TableError(f"--only {only}: there is no mutation {unknown[0]!r}")
    return [m for m in MUTATIONS if m.id in names or m.id.split(".")[0] in names]


def row(outcome: Outcome) -> str:
    """One line of the table."""
    m = outcome.mutation
    return f"| {m.id} | {m.what} | {outcome.killer or 'SURVIVED'} | {outcome.seconds:.1f} |"


def main(arguments: list[str]) -> int:
    """Run; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="IDS", help="ids or letters, joined by commas")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table here as well")
    options = parser.parse_args(arguments)
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    lines = [f"commit {commit}", "| Id | Mutation | Killed by | Seconds |", "|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="ds4-mutate-") as folder:
        tree = Path(folder)
        try:
            chosen = select(options.only)
            copy_tree(tree)
            check_baseline(chosen, tree)
            for mutation in chosen:
                outcome = judge(mutation, tree)
                survivors += outcome.killer is None
                lines.append(row(outcome))
                print(lines[-1], flush=True)
        except TableError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    ending = [f"{m.id}: {m.note}" for m in chosen if m.note]
    ending.append(f"{len(chosen)} mutations, {survivors} survived")
    print("\n".join(["", *ending]))
    lines += ["", *ending]
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
