"""Judge a bundled model file with an independent implementation, on the CPU.

    python tools/check_tales.py tales.gguf --prepared work --out checked

The file is dequantized and run by transformers in float32 with eager attention. Written: the
held-out loss, sample texts, an excerpt of held-out text for perplexity tests, and reference
logits (`ids` int32 (n,), `positions` int32 (m,), `logits` float32 (m, vocab)).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import export_gguf
import numpy as np
import torch
import torch.nn.functional as F
from tales_data import ASSISTANT, BOS, END_THINK, THINK, USER
from tokenizers import Tokenizer

PROMPTS = {
    "plain": BOS + "Once upon a time there was a",
    "chat": BOS + USER + "Tell me a story about a fox." + ASSISTANT + END_THINK,
    "thinking": BOS + "You are a helpful assistant" + USER
    + "Tell me a story about a king and a princess." + ASSISTANT + THINK,
    "hello": BOS + "You are a helpful assistant" + USER + "Hello" + ASSISTANT + THINK,
}  # fmt: skip
MARK = "\n<|block|>\n"


def loss_of(model: torch.nn.Module, rows: np.ndarray) -> tuple[float, int]:
    """Mean nats per token and the number of tokens, rows (N, width) padded with -1."""
    total, count = 0.0, 0
    for row in rows:
        ids = torch.from_numpy(row[row >= 0].astype(np.int64))[None]
        logits = model(ids, use_cache=False).logits
        total += F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return total / count, count


def generate(
    model: torch.nn.Module, ids: list[int], *, limit: int, temperature: float, seed: int
) -> list[int]:
    """Continue `ids` with a cache until the end token or `limit` new tokens."""
    rng = torch.Generator().manual_seed(seed)
    feed, cache, out = torch.tensor([ids]), None, []
    for _ in range(limit):
        step = model(feed, cache=cache, use_cache=True)
        cache, logits = step.cache, step.logits[0, -1]
        if temperature == 0:
            token = int(logits.argmax())
        else:
            prob = torch.softmax(logits / temperature, -1)
            prob[prob < 0.05 * prob.max()] = 0  # the engine's default min-p
            token = int(torch.multinomial(prob, 1, generator=rng))
        out.append(token)
        if token == 1:
            break
        feed = torch.tensor([[token]])
    return out


def excerpt(blocks: list[str], size: int) -> str:
    """Whole held-out blocks from all over the collection, about `size` characters."""
    need = max(1, round(size / (sum(map(len, blocks)) / len(blocks))))
    step = len(blocks) / need
    return "\n\n".join(blocks[int(i * step)] for i in range(need)) + "\n"


def save(path: Path, report: dict) -> None:
    """Write the report as it stands."""
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@torch.no_grad()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=6, help="use every Nth held-out row")
    parser.add_argument("--limit", type=int, default=150, help="new tokens of a sample")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tok = Tokenizer.from_file(str(args.prepared / "tokenizer.json"))
    model = export_gguf.transformers_model(args.file)
    began = time.monotonic()
    report: dict = {"file_bytes": args.file.stat().st_size, "samples": []}
    blocks = (args.prepared / "heldout.txt").read_text(encoding="utf-8").split(MARK)
    (args.out / "tales-heldout.txt").write_text(excerpt(blocks, 26000), encoding="utf-8")
    ids = np.array(tok.encode(BOS + blocks[3]).ids[:180], np.int32)
    logits = model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0].numpy()
    positions = np.array(sorted({*range(9, 180, 10), 127, 128, 179}), np.int32)
    np.savez_compressed(
        args.out / "tales-reference.npz",
        ids=ids, positions=positions, logits=logits[positions].astype(np.float32),
    )  # fmt: skip
    rows = np.load(args.prepared / "data.npz")["val"][:: args.every]
    nats, count = loss_of(model, rows)
    chars = sum(len(tok.decode(row[row > 2].tolist())) for row in rows)
    report |= {
        "held_out_tokens": count, "held_out_chars": chars, "nats_per_token": round(nats, 4),
        "perplexity": round(math.exp(nats), 2), "chars_per_token": round(chars / count, 3),
        "bits_per_char": round(nats * count / chars / math.log(2), 4),
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    print({k: v for k, v in report.items() if k != "samples"}, flush=True)
    save(args.out / "tales-check.json", report)
    for name, prompt in PROMPTS.items() if args.limit else ():
        for temperature in (0.0, 0.8):
            ids = tok.encode(prompt).ids
            new = generate(model, ids, limit=args.limit, temperature=temperature, seed=1)
            text = tok.decode(new, skip_special_tokens=False)
            sample = {"kind": name, "prompt": prompt, "temperature": temperature, "text": text}
            report["samples"].append(sample)
            print(f"--- {name}, temperature {temperature}\n{prompt}|{text}", flush=True)
            save(args.out / "tales-check.json", report)


if __name__ == "__main__":
    main()
