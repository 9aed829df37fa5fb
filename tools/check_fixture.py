"""Compare the CPU backend with a fixture's reference logits, position by position.

usage: python tools/check_fixture.py DIR [DIR ...]

A fixture folder holds `model.gguf`, `prompts.json` ({"prompts": [{"text", "ids", "greedy"}]}) and
`reference.npz` with `logits_i`, `greedy_i`, `router_margin_i` and `index_margin_i` of prompt i.
Prints a row a prompt and exits 1 when a position before the first near-tie is off by 1e-4 or more,
a greedy continuation differs, or the text encodes to other ids. The rounded path is compared with
the NumPy reference under the same rounding, where the folder has `reference_qat.npz` also with it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import ds4
from ds4.gguf import GGUFFile
from ds4.model.deepseek4.reference import ReferenceModel
from ds4.model.deepseek4.rounding import Rounding
from ds4.steps import Want

TOLERANCE = 1e-4
NEAR_TIE = 1e-5
GREEDY = ds4.SamplingParams(temperature=0.0)


def relative_error(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Relative 2-norm of each row."""
    difference = np.linalg.norm(found.astype(np.float64) - expected, axis=1)
    return difference / np.linalg.norm(expected.astype(np.float64), axis=1)


def logits_of(model: ds4.Model, ids: list[int]) -> np.ndarray:
    """Float32 logits after every token of a prompt of two tokens or more."""
    with model.session(len(ids)) as session:
        row = session.feed(ids, want=Want.ALL_LOGITS)
    assert row is not None
    assert row.logits is not None
    return row.logits


def check(folder: Path) -> bool:
    """Compare one folder; prints as it goes."""
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    reference = np.load(folder / "reference.npz")
    good = True
    with ds4.open_model(folder / "model.gguf") as model:
        for i, prompt in enumerate(prompts):
            ids = prompt["ids"]
            same_ids = model.tokenizer.encode(prompt["text"], special=True) == ids
            error = relative_error(logits_of(model, ids), reference[f"logits_{i}"])
            margin = np.minimum(reference[f"router_margin_{i}"], reference[f"index_margin_{i}"])
            ties = np.flatnonzero(margin < NEAR_TIE)
            before = error[: ties[0]] if ties.size else error
            greedy = "-"
            if f"greedy_{i}" in reference:
                expected = reference[f"greedy_{i}"].tolist()
                with model.session() as session:
                    found: list[int] = []
                    row = session.feed(ids, sampling=GREEDY)
                    while len(found) < len(expected) and row is not None and row.token is not None:
                        found.append(int(row.token))
                        row = session.feed([row.token], sampling=GREEDY)
                greedy = "equal" if found == expected else "DIFFERENT"
            ok = same_ids and greedy != "DIFFERENT" and float(before.max()) < TOLERANCE
            good &= ok
            print(
                f"{folder.name} prompt {i}: {len(ids):4} tokens, error max {error.max():.1e} "
                f"median {np.median(error):.1e}, near-ties {ties.size}, greedy {greedy}, "
                f"ids {'equal' if same_ids else 'DIFFERENT'}: {'ok' if ok else 'WRONG'}",
                flush=True,
            )
    check_rounding(folder, prompts)
    return good


def check_rounding(folder: Path, prompts: list[dict[str, list[int]]]) -> None:
    """Print how the rounded path compares; a flip at a rounding boundary is no error."""
    path = folder / "reference_qat.npz"
    rounded = np.load(path) if path.exists() else None
    with (
        ds4.open_model(folder / "model.gguf", activation_rounding="vendor") as model,
        GGUFFile.open(folder / "model.gguf") as file,
    ):
        slow = ReferenceModel(file, Rounding.VENDOR)
        for i in (1, 2, 3):
            ids = prompts[i]["ids"]
            found = logits_of(model, ids)
            error = relative_error(found, slow.forward(slow.new_state(), ids))
            line = f"{folder.name} prompt {i} rounded: against NumPy max {error.max():.1e}"
            if rounded is not None:
                other = relative_error(found, rounded[f"logits_{i}"])
                line += f", against reference_qat median {np.median(other):.1e}"
            print(line, flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    verdicts = [check(Path(name)) for name in sys.argv[1:]]
    sys.exit(0 if all(verdicts) else 1)
