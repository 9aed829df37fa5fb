"""`ds4 --inspect`: what a model file holds and needs, from its header alone.

Nothing is run and no tokenizer is built, so an 80 GiB file is answered from a few megabytes of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ds4.errors import WorldRefused
from ds4.gguf import GGUFFile, TensorInfo
from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.model.deepseek4.tensors import bytes_by_class, bytes_read_per_token, load_shape
from ds4.partition.memory import MemoryPlan, partial_state_bytes, session_rows_bytes
from ds4.partition.placement import Placement
from ds4.partition.rules import Mode
from ds4.partition.shards import WORLDS
from ds4.partition.tensor_parallel import plan_rank

__all__ = ["report", "size"]

_CONTEXTS = (4096, 32768, 131072, 393216, 1048576)
_MODES = {Mode.EXPERT_PARALLEL: "EP", Mode.TENSOR_PARALLEL: "TP"}


def size(n: int) -> str:
    """Bytes as text, in a unit that leaves one to four digits before the point."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n >= 1 << power:
            return f"{n / (1 << power):.2f} {unit}"
    return f"{n} B"


def _table(rows: Sequence[Sequence[str]], *, left: int = 1) -> Iterator[str]:
    """Aligned rows; the first `left` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  " + "  ".join(cells).rstrip()


def report(file: GGUFFile, n_ctx: int) -> str:
    """Summary of an opened file.

    Args:
      file: any DeepSeek V4 file.
      n_ctx: context that the memory plan is made for; capped by what the model was trained for.

    Raises:
      UnsupportedModelError, ModelFileError: it is not a usable model.
    """
    shape = load_shape(file)
    n_ctx = min(n_ctx, shape.n_ctx_train)
    sections = (
        ("Model", _model(file, shape)),
        ("Shape", _shape(shape)),
        ("Quantization", _quantization(file)),
        ("Weights by class", _weights(file, shape)),
        ("KV bytes of one session", _contexts(shape)),
        ("Weights per rank", _ranks(file, shape)),
        (f"Planned memory, one session of {n_ctx} tokens, float32 KV", _memory(file, shape, n_ctx)),
    )
    return "\n\n".join(f"{title}\n" + "\n".join(lines) for title, lines in sections) + "\n"


def _model(file: GGUFFile, shape: DeepSeek4Shape) -> Iterator[str]:
    name = file.metadata.get("general.name")
    parameters = sum(info.n_rows * info.ne[0] for info in file.tensors.values())
    yield from _table(
        [
            ("file", file.path),
            ("name", " ".join(str(name).split()) if name is not None else "(none)"),
            ("architecture", str(file.metadata.get("general.architecture"))),
            ("size", f"{file.file_bytes:,} bytes ({size(file.file_bytes)})"),
            ("tensors", f"{len(file.tensors):,}"),
            ("parameters", f"{parameters:,}"),
            ("GGUF version", str(file.version)),
            ("tokenizer", f"{file.metadata.get('tokenizer.ggml.pre')}, {shape.n_vocab:,} tokens"),
            ("chat template", "yes" if "tokenizer.chat_template" in file.metadata else "no"),
            ("identity", file.header_digest().hex()[:32]),
        ],
        left=2,
    )


def _runs(values: Iterable[object]) -> str:
    """A list with repetitions counted."""
    counts = Counter(values)
    ordered = sorted(counts.items(), key=str)
    return ", ".join(f"{value} ({n} layer{'s' * (n != 1)})" for value, n in ordered)


def _shape(s: DeepSeek4Shape) -> Iterator[str]:
    yield from _table(
        [
            ("layers", str(s.n_layers)),
            ("width", f"{s.d_model} in {s.n_streams} streams"),
            ("attention", f"{s.n_heads} heads of {s.head_dim}, {s.rope_dim} rotated, one KV head"),
            ("ranks of projections", f"query {s.q_rank}, output {s.n_groups} x {s.group_rank}"),
            ("window", f"{s.window} tokens"),
            ("compression ratios", _runs(s.ratios)),
            ("indexer", f"{s.n_index_heads} heads of {s.index_dim}, keeps {s.index_top_k} rows"),
            ("experts", f"{s.n_experts} routed, {s.n_used} used, 1 shared, width {s.d_expert}"),
            ("hash-routed layers", str(s.n_hash_layers)),
            ("trained context", f"{s.n_ctx_train:,} tokens"),
        ],
        left=2,
    )


def _quantization(file: GGUFFile) -> Iterator[str]:
    tensors: Counter[str] = Counter()
    n_bytes: Counter[str] = Counter()
    for info in file.tensors.values():
        tensors[info.type.name] += 1
        n_bytes[info.type.name] += info.n_bytes
    total = sum(n_bytes.values()) or 1
    yield from _table(
        [
            (name, f"{tensors[name]} tensors", f"{n:,} bytes", f"{100 * n / total:.2f}%")
            for name, n in n_bytes.most_common()
        ]
    )


def _weights(file: GGUFFile, shape: DeepSeek4Shape) -> Iterator[str]:
    held = bytes_by_class(file, shape)
    read = bytes_read_per_token(file, shape)
    rows = [("", "tensors", "bytes", "read per decoded token")]
    rows += [
        (str(role), str(count), f"{n:,}", f"{read[role]:,}") for role, (count, n) in held.items()
    ]
    count = sum(n for n, _ in held.values())
    total = sum(n for _, n in held.values())
    rows.append(("total", str(count), f"{total:,}", f"{sum(read.values()):,}"))
    yield from _table(rows)


def _contexts(shape: DeepSeek4Shape) -> Iterator[str]:
    contexts = sorted({n for n in _CONTEXTS if n < shape.n_ctx_train} | {shape.n_ctx_train})
    unfinished = partial_state_bytes(shape)
    rows = [("context", "float32", "16-bit")]
    for n in contexts:
        wide, narrow = (session_rows_bytes(shape, n, width) + unfinished for width in (4, 2))
        rows.append((f"{n:,}", f"{wide:,}", f"{narrow:,}"))
    yield from _table(rows, left=0)


def _representatives(
    file: GGUFFile, shape: DeepSeek4Shape
) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """One layer of each make instead of all layers, since equal layers are cut equally.

    Returns:
      Tensors of the chosen layers and of no layer, and for each how many it stands for.
    """
    layers: dict[str, list[TensorInfo]] = {f"blk.{layer}": [] for layer in range(shape.n_layers)}
    chosen: dict[str, TensorInfo] = {}
    weights: dict[str, int] = {}
    for info in file.tensors.values():
        prefix = ".".join(info.name.split(".", 2)[:2])
        if prefix in layers:
            layers[prefix].append(info)
        else:
            chosen[info.name], weights[info.name] = info, 1
    makes: dict[frozenset[tuple[str, tuple[int, ...], str]], list[TensorInfo]] = {}
    counts: Counter[frozenset[tuple[str, tuple[int, ...], str]]] = Counter()
    for infos in layers.values():
        make = frozenset((i.name.split(".", 2)[2], i.ne, i.type.name) for i in infos)
        makes.setdefault(make, infos)
        counts[make] += 1
    for make, infos in makes.items():
        for info in infos:
            chosen[info.name], weights[info.name] = info, counts[make]
    return chosen, weights


def _ranks(file: GGUFFile, shape: DeepSeek4Shape) -> Iterator[str]:
    placement = Placement.contiguous(shape.n_layers, shape.n_experts)
    infos, weights = _representatives(file, shape)
    refusals = []
    rows = [("ranks", "mode", "bytes of each rank", "read per decoded token")]
    for world in WORLDS:
        for mode, label in _MODES.items():
            if world == 1 and mode is Mode.TENSOR_PARALLEL:
                continue  # a world of one is the same in both modes
            held, read = [], []
            try:
                for rank in range(world):
                    plan = plan_rank(
                        infos, shape, mode=mode, world=world, rank=rank, placement=placement
                    )
                    slices = plan.slices.values()
                    held.append(sum(weights[s.name] * s.n_bytes for s in slices))
                    read.append(sum(weights[s.name] * s.read_bytes for s in slices))
            except WorldRefused as refusal:
                rows.append((str(world), label, "refused", refusal.reason))
                refusals.append(f"  {world} {label}: {refusal}")
                continue
            rows.append((str(world), "any" if world == 1 else label, _spread(held), _spread(read)))
    yield from _table(rows, left=2)
    yield from refusals


def _spread(values: Sequence[int]) -> str:
    """One number when all ranks agree, else the least and the most."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _memory(file: GGUFFile, shape: DeepSeek4Shape, n_ctx: int) -> Iterator[str]:
    weights = sum(n for _, n in bytes_by_class(file, shape).values())
    plan = MemoryPlan(
        model_bytes=weights,
        sessions=1,
        session_bytes=session_rows_bytes(shape, n_ctx, 4) + partial_state_bytes(shape),
    )
    rows = [(name, f"{n:,} bytes", size(n)) for name, n in plan.terms() if n]
    rows.append(("total", f"{plan.required_bytes:,} bytes", size(plan.required_bytes)))
    yield from _table(rows)
