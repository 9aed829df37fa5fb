"""Train, export and check the bundled model: a very small storyteller with V4's architecture.

    python tools/train_tales.py prepare --data stories.txt --out work
    python tools/train_tales.py train --prepared work --out run --seconds 400
    python tools/check_tales.py run/tales.gguf --prepared work --out checked

`prepare` and the checks need no GPU. `train` stops by the clock: the learning rate falls to its
end as the seconds run out, whatever the machine's speed. Routed experts are trained through their
2-bit values (a straight-through estimate) for most of the run; everything else is quantized at
the end, where it costs next to nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import export_gguf
import numpy as np
import quantize
import tales_data
import tales_qat
import torch
import torch.nn.functional as F
from tales_model import Shape, Tales
from torch import Tensor

ROUTED = ("gate", "up", "down")


class Batches:
    """Draws training rows on the device: plain text windows first, then chats."""

    def __init__(self, data: dict[str, np.ndarray], device: str, width: int, share: float) -> None:
        """Move the arrays of `data.npz` to the device; `share` of each batch are chats."""
        self.stream = torch.from_numpy(data["stream"].astype(np.int16)).to(device)
        self.starts = torch.from_numpy(data["starts"]).to(device)
        self.starts = self.starts[self.starts + width + 1 < len(self.stream)]
        self.chat = torch.from_numpy(data["chat"].astype(np.int16)).to(device)
        learn = np.unpackbits(data["learn"], axis=1)[:, : self.chat.shape[1]].astype(bool)
        self.learn = torch.from_numpy(learn).to(device)
        self.device, self.width, self.share = device, width, share

    def draw(self, rows: int) -> tuple[Tensor, Tensor]:
        """Input and target ids, both (rows, width); targets are -100 where nothing is learnt."""
        w, dev = self.width, self.device
        chats = round(rows * self.share)
        plain = rows - chats
        openings = plain // 2
        pick = torch.randint(len(self.starts), (openings,), device=dev)
        begin = self.starts[pick].long()
        free = torch.randint(len(self.stream) - w - 1, (plain - openings,), device=dev)
        offset = torch.arange(w + 1, device=dev)
        text = self.stream[torch.cat((begin, free))[:, None] + offset].long()
        # An opening is B followed by a paragraph's beginning, as a prompt without history is.
        text[:openings] = torch.cat((text.new_zeros(openings, 1), text[:openings, :-1]), 1)
        row = torch.randint(len(self.chat), (chats,), device=dev)
        chat, learn = self.chat[row, : w + 1].long(), self.learn[row, : w + 1]
        ids = torch.cat((text, chat))
        target = torch.cat((text[:, 1:], chat[:, 1:].masked_fill(~learn[:, 1:], -100)))
        return ids[:, :-1].contiguous(), target.contiguous()


def requantize(model: Tales, grid: Tensor) -> list[dict[str, object]]:
    """Refresh the 2-bit values of every routed expert; returns their codes, by layer."""
    codes: list[dict[str, object]] = []
    for block in model.blocks:
        layer: dict[str, object] = {}
        for name in ROUTED:
            weight = getattr(block.ffn, name).detach()
            if name == "down":
                value, code = tales_qat.q2_k(weight)
            else:
                value, code = tales_qat.iq2_xxs(weight, grid)
            getattr(block.ffn, f"{name}_q").copy_(value)
            layer[name] = code
        codes.append(layer)
    return codes


def pack(model: Tales, codes: list[dict[str, object]]) -> dict[str, np.ndarray]:
    """The bytes of the routed experts by GGUF name, each (E, rows, bytes of a row)."""
    out = {}
    for i, layer in enumerate(codes):
        for name, code in layer.items():
            arrays = {k: v.cpu().numpy() for k, v in vars(code).items()}
            raw = (quantize.pack_q2_k if name == "down" else quantize.pack_iq2_xxs)(**arrays)
            shape = getattr(model.blocks[i].ffn, name).shape
            out[f"blk.{i}.ffn_{name}_exps.weight"] = raw.reshape(*shape[:-1], -1)
    return out


def set_mix(model: Tales, value: float) -> None:
    """0 runs the routed experts on their float weights, 1 on their 2-bit values."""
    for block in model.blocks:
        block.ffn.mix.fill_(value)


def autocast(device: str, on: bool = True):  # noqa: ANN201
    """bfloat16 matrix products where the device has them."""
    return torch.autocast(device, torch.bfloat16) if on and device == "cuda" else nullcontext()


@torch.no_grad()
def held_out_loss(model: Tales, val: Tensor, *, rows: int = 32, exact: bool = False) -> float:
    """Mean loss in nats per token on rows (N, width) padded with -1."""
    model.eval()
    total, count = 0.0, 0
    with autocast(val.device.type, not exact):
        for part in val.split(rows):
            logits = model(part.clamp(min=0))[0]
            target = part[:, 1:].masked_fill(part[:, 1:] < 0, -100)
            loss = F.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), target.flatten(), reduction="sum"
            )
            total += loss.item()
            count += int((target >= 0).sum())
    model.train()
    return total / count


def parameter_groups(model: Tales, decay: float) -> list[dict]:
    """Weight decay for matrices only; embeddings, gate biases and stream controls go without."""
    yes, no = [], []
    for name, p in model.named_parameters():
        free = p.ndim < 2 or any(k in name for k in ("embed", "ape", "hc", "router"))
        (no if free else yes).append(p)
    return [{"params": yes, "weight_decay": decay}, {"params": no, "weight_decay": 0.0}]


class Trainer:
    """One run: the model, its optimizer, its running average and its log."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Build the model and its optimizer and load the prepared data."""
        self.args, self.began = args, time.monotonic()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(args.seed)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        shape = Shape(
            ratios=tuple(int(r) for r in args.ratios.split(",")), experts=args.experts,
            q_rank=args.q_rank,
        )  # fmt: skip
        self.model = Tales(shape, args.dropout).to(self.device)
        raw = dict(np.load(args.prepared / "data.npz"))
        self.train_chars, self.val_chars = int(raw["chars"]), int(raw["val_chars"])
        self.batches = Batches(raw, self.device, args.width, args.chat_share)
        self.val = torch.from_numpy(raw["val"].astype(np.int64)).to(self.device)
        self.val_tokens = int((self.val[:, 1:] >= 0).sum())
        if args.val_rows:
            self.val = self.val[: args.val_rows]
        self.grid = torch.from_numpy(quantize.iq2_grid()).to(self.device)
        groups = parameter_groups(self.model, args.decay)
        fused = self.device == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=fused)
        self.names = [n for n, _ in self.model.state_dict().items() if "tid2eid" not in n]
        self.average = self.snapshot()
        self.best: tuple[float, str, dict[str, Tensor]] = (math.inf, "", {})
        self.log: list[dict] = []

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of all weights and router biases."""
        state = self.model.state_dict()
        return {n: state[n].detach().clone() for n in self.names}

    @torch.no_grad()
    def restore(self, weights: dict[str, Tensor]) -> None:
        """Put a snapshot back."""
        state = self.model.state_dict()
        for n in self.names:
            state[n].copy_(weights[n])

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """Move the running average towards the weights."""
        state = self.model.state_dict()
        torch._foreach_lerp_(
            [self.average[n] for n in self.names], [state[n] for n in self.names], 1 - decay
        )

    def step(self, rate: float, bias_rate: float) -> tuple[Tensor, Tensor]:
        """One update; returns the token loss and the indexer loss, still on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        ids, target = self.batches.draw(self.args.rows)
        with autocast(self.device):
            logits, aux, load = self.model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
        (loss + self.args.index_weight * aux).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for block, n in zip(self.model.blocks, load, strict=True):
                if not block.ffn.hashed:
                    block.ffn.bias += bias_rate * torch.sign(n.mean() - n)
        return loss.detach(), aux.detach()

    def evaluate(self, step: int, trained: dict) -> None:
        """Held-out loss, 2-bit, of the weights and of their average; remembers the best."""
        now = self.snapshot()
        entry = trained | {"step": step, "seconds": round(time.monotonic() - self.began, 1)}
        mix = float(self.model.blocks[0].ffn.mix)
        for kind, weights in (("weights", now), ("average", self.average)):
            self.restore(weights)
            set_mix(self.model, 0.0)
            entry[f"{kind}_float"] = round(held_out_loss(self.model, self.val), 4)
            requantize(self.model, self.grid)
            set_mix(self.model, 1.0)
            entry[f"{kind}_2bit"] = loss = round(held_out_loss(self.model, self.val), 4)
            if loss < self.best[0]:
                self.best = (
                    loss,
                    f"{kind} at step {step}",
                    {n: t.clone() for n, t in weights.items()},
                )
        self.restore(now)
        requantize(self.model, self.grid)
        set_mix(self.model, mix)
        self.log.append(entry)
        print(json.dumps(entry), flush=True)

    def run(self) -> None:
        """Train until the clock says stop, then export the best weights."""
        args = self.args
        self.step(0.0, 0.0)
        start, end = time.monotonic(), self.began + args.seconds
        print(f"set up in {start - self.began:.1f} s", flush=True)
        step, quantizing, next_eval = 0, False, start + args.eval_every
        losses: list[Tensor] = []
        while (done := (time.monotonic() - start) / (end - start)) < 1 and step < args.max_steps:
            warm = min(1.0, (step + 1) / args.warmup)
            rate = args.lr * warm * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)
            if done >= args.float_share and step % args.requantize_every == 0:
                requantize(self.model, self.grid)
                if not quantizing:
                    set_mix(self.model, 1.0)
                    quantizing = True
            losses.append(torch.stack(self.step(rate, args.bias_rate * (1 - done))))
            step += 1
            self.follow(min(args.average, step / (step + 20)))
            if step % 50 == 0:
                if self.device == "cuda":
                    torch.cuda.synchronize()
                if time.monotonic() >= next_eval:
                    mean = torch.stack(losses).mean(0).tolist()
                    losses = []
                    trained = {"train": round(mean[0], 4), "index": round(mean[1], 4)}
                    self.evaluate(step, trained | {"lr": round(rate, 6), "quantizing": quantizing})
                    next_eval = time.monotonic() + args.eval_every
        mean = torch.stack(losses).mean(0).tolist() if losses else [math.nan] * 2
        self.evaluate(step, {"train": round(mean[0], 4), "index": round(mean[1], 4)})
        self.finish(step, time.monotonic() - start)

    @torch.no_grad()
    def finish(self, steps: int, seconds: float) -> None:
        """Export the best weights and write the log."""
        args, out = self.args, self.args.out
        out.mkdir(parents=True, exist_ok=True)
        self.restore(self.best[2])
        codes = requantize(self.model, self.grid)
        path = out / f"{args.name}.gguf"
        export_gguf.write(
            path, self.model, pack(self.model, codes), args.prepared / "tokenizer.json"
        )
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        final = {}
        for kind, mix in (("float", 0.0), ("2bit", 1.0)):
            set_mix(self.model, mix)
            final[kind] = round(held_out_loss(self.model, self.val, exact=True), 4)
        load = sum(self.model(self.val[i : i + 8].clamp(min=0))[2] for i in range(0, 32, 8))
        parameters = sum(p.numel() for p in self.model.parameters())
        cuda = self.device == "cuda"
        machine = torch.cuda.get_device_name() if cuda else platform.machine()
        report = {
            "command": " ".join(Path(a).name if "/" in a else a for a in sys.argv),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine,
            "torch": torch.__version__,
            "shape": self.model.shape.to_dict(), "parameters": parameters,
            "file_bytes": path.stat().st_size,
            "rows": args.rows, "width": args.width, "steps": steps,
            "tokens_seen": steps * args.rows * args.width, "train_seconds": round(seconds, 1),
            "train_tokens": len(self.batches.stream), "train_chars": self.train_chars,
            "held_out_tokens": self.val_tokens, "held_out_chars": self.val_chars,
            "chosen": self.best[1], "final_float32": final,
            "expert_share": [[round(v, 3) for v in r] for r in
                             (load / load.sum(-1, keepdim=True)).tolist()],
            "evaluations": self.log,
        }  # fmt: skip
        text = json.dumps(report, indent=1)
        (out / f"{args.name}-training.json").write_text(text + "\n", encoding="utf-8")
        print(json.dumps({k: v for k, v in report.items() if k != "evaluations"}), flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("prepare", help="tokenizer, training arrays, held-out text")
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--vocab", type=int, default=2048)
    p.add_argument("--width", type=int, default=512)
    p.add_argument("--chat-rows", type=int, default=12000)
    p.add_argument("--chat-books", type=int, default=7, help="chats draw on the first N books")
    p.add_argument("--seed", type=int, default=7)
    t = commands.add_parser("train", help="train and write the GGUF file and the log")
    t.add_argument("--prepared", type=Path, required=True)
    t.add_argument("--out", type=Path, required=True)
    t.add_argument("--name", default="tales")
    t.add_argument("--ratios", default="0,0,4,128", help="compression ratio of each layer")
    t.add_argument("--experts", type=int, default=16)
    t.add_argument("--q-rank", type=int, default=128)
    t.add_argument("--seconds", type=float, default=400, help="wall time to the last step")
    t.add_argument("--max-steps", type=int, default=1 << 30)
    t.add_argument("--rows", type=int, default=64)
    t.add_argument("--width", type=int, default=512)
    t.add_argument("--lr", type=float, default=2e-3)
    t.add_argument("--warmup", type=int, default=150)
    t.add_argument("--decay", type=float, default=0.1)
    t.add_argument("--dropout", type=float, default=0.1)
    t.add_argument("--chat-share", type=float, default=0.27)
    t.add_argument("--float-share", type=float, default=0.15, help="part before 2-bit training")
    t.add_argument("--requantize-every", type=int, default=2)
    t.add_argument("--index-weight", type=float, default=0.3)
    t.add_argument("--bias-rate", type=float, default=2e-3)
    t.add_argument("--average", type=float, default=0.998)
    t.add_argument("--eval-every", type=float, default=40)
    t.add_argument("--val-rows", type=int, default=0, help="held-out rows to use; 0 is all")
    t.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.command == "prepare":
        tales_data.prepare(
            args.data, args.out, vocab=args.vocab, width=args.width, rows=args.chat_rows,
            books=args.chat_books, seed=args.seed,
        )  # fmt: skip
    else:
        Trainer(args).run()


if __name__ == "__main__":
    main()
