"""The CPU backend keeps nothing expanded: its own memory stays small beside the mapped file."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.modelmaker import metadata, write_model

LIMIT_BYTES = 400 << 20

SCRIPT = """
import json, sys
import numpy as np
from ds4.cpu.executor import CpuExecutor
from ds4.gguf import GGUFFile
from ds4.steps import Chunk, Decode, StepPlan, Want

executor = CpuExecutor(GGUFFile.open(sys.argv[1]), threads=1)
executor.open_session(1, 1024)
ids = np.random.default_rng(0).integers(0, 300, 300)
executor.step(StepPlan(step=1, prefill=(Chunk(session=1, start=0, tokens=ids, want=Want.TOKEN),)))
for i in range(4):
    entry = Decode(session=1, position=300 + i, token=7)
    executor.step(StepPlan(step=2 + i, decode=(entry,)))
status = dict(
    line.split(":", 1) for line in open("/proc/self/status").read().splitlines() if ":" in line
)
print(json.dumps({k: int(status[k].split()[0]) * 1024 for k in ("VmHWM", "RssAnon", "RssFile")}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_peak_memory_stays_below_the_mapped_file_plus_400_mb(tmp_path):
    values = metadata(
        embedding_length=1024,
        expert_count=256,
        expert_feed_forward_length=1024,
        block_count=2,
        attention__compress_ratios=[4, 128],
        swiglu_clamp_exp=[10.0, 10.0],
    )
    path = write_model(tmp_path / "large.gguf", values)
    size = path.stat().st_size
    assert size > LIMIT_BYTES, "the file must be larger than the allowance"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)], check=True, capture_output=True, text=True
    )
    memory = json.loads(done.stdout)
    path.unlink()
    assert memory["VmHWM"] < size + LIMIT_BYTES
    # The file's pages are shared and can be dropped; what the process owns is what counts.
    assert memory["RssAnon"] < LIMIT_BYTES
    assert memory["RssFile"] > size // 2, "the run must have touched most of the file"
