"""Hypothesis strategies for every protocol message, built from the ranges the fields state."""

from __future__ import annotations

import attrs
import numpy as np
from hypothesis import strategies as st

from ds4.protocol import fields as f
from ds4.protocol import steps_wire
from ds4.protocol.identity import Geometry
from ds4.protocol.messages import MESSAGES, Config, Hello, NcclVote, Step, StepMode
from ds4.sampling import SamplingParams
from ds4.steps import Chunk, Decode, RowResult, StepPlan, Want

u64 = st.integers(0, 2**64 - 1)
token = st.integers(0, 2**31 - 1)

sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    seed=u64,
)
chunks = st.builds(
    Chunk,
    session=u64,
    start=u64,
    tokens=st.lists(token, min_size=1, max_size=20).map(lambda ids: np.array(ids, np.int32)),
    want=st.sampled_from(Want.ALL),
    sampling=sampling,
)
decodes = st.builds(
    Decode,
    session=u64,
    position=u64,
    token=token,
    want=st.sampled_from(Want.ALL),
    sampling=sampling,
)


@st.composite
def plans(draw):
    entries = draw(st.lists(st.one_of(chunks, decodes), max_size=6, unique_by=lambda e: e.session))
    return StepPlan(
        step=draw(u64),
        prefill=tuple(e for e in entries if isinstance(e, Chunk)),
        decode=tuple(e for e in entries if isinstance(e, Decode)),
    )


@st.composite
def rows(draw):
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 5)))
    count = shape[0] * shape[1]
    values = draw(st.lists(st.floats(width=32), min_size=count, max_size=count))
    logits = np.array(values, np.float32).reshape(shape)
    return RowResult(
        session=draw(u64),
        token=draw(st.none() | token),
        logits=draw(st.none() | st.just(logits)),
    )


def values(field):
    """Any value that a field type accepts."""
    match field:
        case f.Int():
            return st.integers(field.low, field.high) | st.sampled_from([field.low, field.high])
        case f.Choice():
            return st.sampled_from(field.accepted)
        case f.Bool():
            return st.booleans()
        case f.Float():
            return st.floats(0, allow_infinity=False, allow_nan=False)
        case f.Text():
            return st.text(max_size=min(20, field.max_bytes // 4))
        case f.Octets():
            return st.binary(min_size=field.low, max_size=min(field.high, field.low + 40))
        case f.Pair():
            return st.tuples(*(values(part) for part in field.parts))
        case f.ListOf():
            return st.lists(values(field.item), max_size=4).map(tuple)
        case f.Record() if field.cls is Geometry:
            return geometries
        case steps_wire.PlanField():
            return plans()
        case steps_wire.RowsField():
            return st.lists(rows(), max_size=3).map(tuple)
    raise AssertionError(f"no strategy for {field}")


def any_of(cls, **fixed):
    """Instances of an attrs class whose fields have field types."""
    given = {
        a.name: fixed[a.name] if a.name in fixed else values(a.validator) for a in attrs.fields(cls)
    }
    return st.builds(cls, **given)


geometries = any_of(Geometry, world=st.integers(1, 8))


@st.composite
def hellos(draw):
    geometry = draw(geometries)
    role = draw(st.integers(0, 1))
    return Hello(
        role=role,
        rank=draw(st.integers(0, geometry.world - 1)) if role else 0,
        pid=draw(u64),
        host=draw(st.text(max_size=20)),
        geometry_hash=geometry.geometry_hash(),
        geometry=geometry,
        device=draw(st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9))).map(tuple)),
    )


@st.composite
def steps(draw):
    plan = draw(plans())
    busy = st.sampled_from([StepMode.EAGER, StepMode.GRAPH])
    return Step(
        plan=plan,
        bucket=draw(st.integers(0, 255)),
        mode=int(draw(busy) if plan.n_rows else StepMode.NOOP),
        chk=draw(st.binary(max_size=64)),
    )


_SPECIAL = {
    Hello: hellos(),
    Step: steps(),
    Config: any_of(Config, buckets=st.sets(st.integers(1, 9999), max_size=5).map(
        lambda sizes: tuple(sorted(sizes)))),
    NcclVote: any_of(NcclVote, usable=st.just(True), reason=st.just(""))
    | any_of(NcclVote, usable=st.just(False), reason=st.text(min_size=1, max_size=9)),
}  # fmt: skip

BY_CLASS = {cls: _SPECIAL[cls] if cls in _SPECIAL else any_of(cls) for cls in MESSAGES}
messages = st.one_of(*BY_CLASS.values())

__all__ = ["BY_CLASS", "chunks", "decodes", "geometries", "messages", "plans"]
