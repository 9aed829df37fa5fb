"""Shared paths and models. Fixture files are described in `tests/data/README.md`."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from ds4.gguf import GGUFFile

DATA = Path(__file__).parent / "data"

# A property says nothing about time, and a busy machine must not fail it.
settings.register_profile("ds4", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ds4")


@attrs.frozen
class Oracle:
    """A tiny random model with logits from an independent implementation."""

    name: str
    path: Path
    prompts: list[dict]
    reference: dict[str, np.ndarray]

    def indices(self) -> list[int]:
        """Prompts whose logits are kept in the repository."""
        return sorted(int(k.split("_")[1]) for k in self.reference if k.startswith("logits_"))

    def ids(self, index: int) -> list[int]:
        return self.prompts[index]["ids"]


def load_oracle(name: str) -> Oracle:
    prompts = json.loads((DATA / f"{name}-prompts.json").read_text())["prompts"]
    with np.load(DATA / f"{name}-reference.npz") as arrays:
        reference = {key: arrays[key] for key in arrays.files}
    return Oracle(name, DATA / f"{name}.gguf", prompts, reference)


@pytest.fixture(scope="session", params=["v4-tiny-f32", "v4-tiny-q2"])
def oracle(request: pytest.FixtureRequest) -> Oracle:
    return load_oracle(request.param)


@pytest.fixture(scope="session")
def q2_oracle() -> Oracle:
    return load_oracle("v4-tiny-q2")


@pytest.fixture
def oracle_file(oracle: Oracle):
    with GGUFFile.open(oracle.path) as file:
        yield file


@pytest.fixture
def q2_file(q2_oracle: Oracle):
    with GGUFFile.open(q2_oracle.path) as file:
        yield file


def relative_error(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Relative 2-norm per row."""
    difference = np.linalg.norm(found.astype(np.float64) - expected, axis=-1)
    return difference / np.linalg.norm(expected.astype(np.float64), axis=-1)
