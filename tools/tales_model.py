"""The DeepSeek V4 architecture as a plain PyTorch module, for training a very small one.

It is written for whole sequences from position 0, without a cache, and computes every expert for
every token (16 experts of width 256 are cheaper that way than any gather). `to_transformers`
renames the weights for `DeepseekV4ForCausalLM`, which computes the same function.

Shapes: B batch, S tokens, D model width, H heads, W head width, n streams, T compressed rows,
E experts, F expert width.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6
# Training stops the Sinkhorn loop early to keep the graph small; evaluation never does.
TRAIN_SINKHORN = 6


@dataclass(frozen=True)
class Shape:
    """Hyperparameters; the names follow the GGUF keys where one exists."""

    vocab: int = 2048
    ratios: tuple[int, ...] = (0, 0, 4, 128)
    hash_layers: int = 3
    dim: int = 256
    heads: int = 8
    head_dim: int = 128
    rope_dim: int = 64
    q_rank: int = 128
    o_groups: int = 8
    o_rank: int = 32
    window: int = 128
    index_heads: int = 16
    index_dim: int = 128
    index_top_k: int = 32
    streams: int = 4
    sinkhorn: int = 20
    experts: int = 16
    experts_used: int = 4
    expert_dim: int = 256
    expert_scale: float = 1.5
    clamp: float = 10.0
    rope_base: float = 10000.0
    rope_base_compressed: float = 160000.0
    yarn_factor: float = 16.0
    yarn_context: int = 256
    context: int = 4096

    @property
    def layers(self) -> int:
        """Number of transformer layers."""
        return len(self.ratios)

    def to_dict(self) -> dict:
        """Plain values, for JSON."""
        return asdict(self) | {"ratios": list(self.ratios)}


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """RMS norm over the last axis, in float32."""
    x = x.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return y if weight is None else y * weight


def rope_frequencies(shape: Shape, compressed: bool) -> Tensor:
    """Angle per position, float64 (rope_dim/2,); YaRN only where rows are compressed."""
    half = torch.arange(0, shape.rope_dim, 2, dtype=torch.float64) / shape.rope_dim
    if not compressed:
        return shape.rope_base**-half
    freq = shape.rope_base_compressed**-half

    def corner(turns: float) -> float:
        top = math.log(shape.yarn_context / (turns * 2 * math.pi))
        return shape.rope_dim * top / (2 * math.log(shape.rope_base_compressed))

    low = max(math.floor(corner(32.0)), 0)
    high = min(math.ceil(corner(1.0)), shape.rope_dim - 1)
    ramp = (torch.arange(len(freq), dtype=torch.float64) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return freq * keep + freq / shape.yarn_factor * (1 - keep)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs of the last 2*k channels of x (..., S, W) by cos, sin (S, k)."""
    k = cos.shape[-1]
    rest, tail = x[..., : -2 * k], x[..., -2 * k :].float()
    a, b = tail.unflatten(-1, (k, 2)).unbind(-1)
    tail = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((rest.to(tail.dtype), tail), -1)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type matrix products run in: the autocast type where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class HyperConnection(nn.Module):
    """mHC control: from the streams to the sublayer input, its gains and the stream mixer."""

    def __init__(self, shape: Shape, layer: int) -> None:
        """Create the parameters."""
        super().__init__()
        n = shape.streams
        self.n, self.iterations = n, shape.sinkhorn
        self.fn = nn.Parameter(torch.randn((2 + n) * n, n * shape.dim) * 0.02)
        self.scale = nn.Parameter(torch.full((3,), 0.1))
        pre = torch.full((n,), -1.5)
        pre[layer % n] = 1.5
        comb = torch.eye(n) * 3.0
        self.base = nn.Parameter(torch.cat((pre, torch.zeros(n), comb.flatten())))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map x (B, S, n, D) -> input (B, S, D), post (B, S, n), comb (B, S, n, n)."""
        n = self.n
        with torch.autocast(x.device.type, enabled=False):
            m = F.linear(rms(x.flatten(2)), self.fn)
            pre = torch.sigmoid(m[..., :n] * self.scale[0] + self.base[:n]) + EPS
            post = 2 * torch.sigmoid(m[..., n : 2 * n] * self.scale[1] + self.base[n : 2 * n])
            c = (m[..., 2 * n :] * self.scale[2] + self.base[2 * n :]).unflatten(-1, (n, n))
            c = torch.softmax(c, -1) + EPS
            c = c / (c.sum(-2, keepdim=True) + EPS)
            for _ in range((TRAIN_SINKHORN if self.training else self.iterations) - 1):
                c = c / (c.sum(-1, keepdim=True) + EPS)
                c = c / (c.sum(-2, keepdim=True) + EPS)
            return (pre.unsqueeze(-1) * x).sum(2), post, c

    @staticmethod
    def merge(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Map x (B, S, n, D) mixed by comb transposed, plus y (B, S, D) on every stream."""
        out = post.unsqueeze(-1) * y.float().unsqueeze(-2)
        for r in range(x.shape[2]):
            out = out + comb[..., r, :].unsqueeze(-1) * x[..., r : r + 1, :]
        return out


class Compressor(nn.Module):
    """Pools each window of `ratio` tokens into one row, per channel; ratio 4 overlaps windows."""

    def __init__(self, shape: Shape, ratio: int, width: int) -> None:
        """Create the parameters."""
        super().__init__()
        self.ratio, self.width = ratio, width
        out = width * (2 if ratio == 4 else 1)
        self.kv = nn.Linear(shape.dim, out, bias=False)
        self.gate = nn.Linear(shape.dim, out, bias=False)
        self.ape = nn.Parameter(torch.zeros(ratio, out))
        self.norm = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x (B, S, D), cos/sin (S, k) -> rows (B, S // ratio, width), rotated."""
        r, w, rows = self.ratio, self.width, x.shape[1] // self.ratio
        x = x[:, : rows * r]
        k = self.kv(x).float().unflatten(1, (rows, r))
        s = self.gate(x).float().unflatten(1, (rows, r)) + self.ape
        if r == 4:
            k_before = F.pad(k[:, :-1, :, :w], (0, 0, 0, 0, 1, 0))
            s_before = F.pad(s[:, :-1, :, :w], (0, 0, 0, 0, 1, 0), value=-1e30)
            k = torch.cat((k_before, k[..., w:]), 2)
            s = torch.cat((s_before, s[..., w:]), 2)
        pooled = rms((k * torch.softmax(s, 2)).sum(2), self.norm)
        return rotate(pooled, cos[: rows * r : r], sin[: rows * r : r])


class Indexer(nn.Module):
    """Scores compressed rows for each query; the best `top_k` are attended to."""

    def __init__(self, shape: Shape) -> None:
        """Create the parameters."""
        super().__init__()
        self.heads, self.width = shape.index_heads, shape.index_dim
        self.q_b = nn.Linear(shape.q_rank, self.heads * self.width, bias=False)
        self.proj = nn.Linear(shape.dim, self.heads, bias=False)
        self.compressor = Compressor(shape, 4, self.width)

    def forward(self, x: Tensor, latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x (B, S, D), latent (B, S, q_rank) -> scores (B, S, T)."""
        keys = self.compressor(x, cos, sin)
        q = self.q_b(latent).unflatten(-1, (self.heads, self.width)).transpose(1, 2)
        q = rotate(q, cos, sin)
        hit = F.relu(q.to(x.dtype) @ keys.to(x.dtype).unsqueeze(1).transpose(-1, -2))
        weight = self.proj(x).float() * (self.heads * self.width) ** -0.5
        return torch.einsum("bhst,bsh->bst", hit.float(), weight)


class Attention(nn.Module):
    """Shared-KV attention: a sliding window, a sink, and compressed rows where ratio is set."""

    def __init__(self, shape: Shape, layer: int) -> None:
        """Create the parameters."""
        super().__init__()
        self.shape, self.ratio = shape, shape.ratios[layer]
        hw = shape.heads * shape.head_dim
        self.q_a = nn.Linear(shape.dim, shape.q_rank, bias=False)
        self.q_a_norm = nn.Parameter(torch.ones(shape.q_rank))
        self.q_b = nn.Linear(shape.q_rank, hw, bias=False)
        self.kv = nn.Linear(shape.dim, shape.head_dim, bias=False)
        self.kv_norm = nn.Parameter(torch.ones(shape.head_dim))
        self.sinks = nn.Parameter(torch.zeros(shape.heads))
        group_in = hw // shape.o_groups
        self.o_a = nn.Parameter(
            torch.randn(shape.o_groups, shape.o_rank, group_in) * group_in**-0.5
        )
        self.o_b = nn.Linear(shape.o_groups * shape.o_rank, shape.dim, bias=False)
        self.compressor = Compressor(shape, self.ratio, shape.head_dim) if self.ratio else None
        self.indexer = Indexer(shape) if self.ratio == 4 else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Map x (B, S, D) -> output (B, S, D), indexer loss (scalar; 0 without indexer)."""
        shape, s = self.shape, x.shape[1]
        pos = torch.arange(s, device=x.device)
        latent = rms(self.q_a(x), self.q_a_norm).to(x.dtype)
        q = rms(self.q_b(latent).unflatten(-1, (shape.heads, shape.head_dim))).transpose(1, 2)
        q = rotate(q, cos, sin)  # (B, H, S, W)
        k = rotate(rms(self.kv(x), self.kv_norm), cos, sin)  # (B, S, W)
        gap = pos[:, None] - pos[None, :]
        hide = (gap < 0) | (gap >= shape.window)  # (S, S)
        aux = x.new_zeros((), dtype=torch.float32)
        if self.compressor is not None:
            rows = self.compressor(x, cos, sin)
            k = torch.cat((k, rows), 1)
            late = torch.arange(rows.shape[1], device=x.device) >= (pos[:, None] + 1) // self.ratio
            hide = torch.cat((hide, late), 1)
        logits = (q.to(x.dtype) @ k.to(x.dtype).unsqueeze(1).transpose(-1, -2)).float()
        logits = logits * shape.head_dim**-0.5
        hide = hide.expand(x.shape[0], 1, -1, -1)
        if self.indexer is not None:
            scores = self.indexer(x.detach(), latent.detach(), cos, sin)
            scores = scores.masked_fill(late, -1e30)
            aux = self._index_loss(scores, logits[..., s:].detach(), late)
            top = min(shape.index_top_k, scores.shape[-1])
            chosen = torch.zeros_like(late).expand_as(scores)
            chosen = chosen.scatter(-1, scores.topk(top, -1).indices, True)
            hide = torch.cat((hide[..., :s], hide[..., s:] | ~chosen.unsqueeze(1)), -1)
        logits = logits.masked_fill(hide, -1e30)
        sink = self.sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        prob = torch.softmax(torch.cat((logits, sink), -1), -1)[..., :-1]
        out = prob.to(x.dtype) @ k.to(x.dtype).unsqueeze(1)
        out = rotate(out, cos, -sin).transpose(1, 2).to(x.dtype)  # (B, S, H, W)
        low = torch.einsum(
            "bsgi,gri->bsgr",
            out.unflatten(2, (shape.o_groups, -1)).flatten(3),
            self.o_a.to(x.dtype),
        )
        return self.o_b(low.flatten(2)), aux

    @staticmethod
    def _index_loss(scores: Tensor, logits: Tensor, late: Tensor) -> Tensor:
        """Divergence of the indexer's distribution from the heads' mean one over visible rows."""
        target = torch.softmax(logits.masked_fill(late, -1e30), -1).mean(1)
        cross = -(target * torch.log_softmax(scores, -1)).masked_fill(late, 0.0).sum(-1)
        visible = (~late).any(-1)  # (S,): the first queries see no row at all
        return (cross * visible).sum() / (visible.sum() * cross.shape[0])


class Experts(nn.Module):
    """Routed and shared experts; `mix` slides the routed weights onto their quantized values."""

    def __init__(self, shape: Shape, layer: int) -> None:
        """Create the parameters."""
        super().__init__()
        e, f, d = shape.experts, shape.expert_dim, shape.dim
        self.shape, self.hashed = shape, layer < shape.hash_layers
        self.router = nn.Parameter(torch.randn(e, d) * d**-0.5)
        self.gate = nn.Parameter(torch.randn(e, f, d) * d**-0.5)
        self.up = nn.Parameter(torch.randn(e, f, d) * d**-0.5)
        self.down = nn.Parameter(torch.randn(e, d, f) * f**-0.5 * 0.5)
        self.shared_gate = nn.Linear(d, f, bias=False)
        self.shared_up = nn.Linear(d, f, bias=False)
        self.shared_down = nn.Linear(f, d, bias=False)
        for name in ("gate", "up", "down"):
            value = getattr(self, name).detach().clone()
            self.register_buffer(f"{name}_q", value, persistent=False)
        self.register_buffer("mix", torch.zeros(()), persistent=False)
        if self.hashed:
            self.register_buffer("tid2eid", hash_table(shape, layer))
        else:
            self.register_buffer("bias", torch.zeros(e))

    def _weight(self, name: str) -> Tensor:
        w = getattr(self, name)
        return w + self.mix * (getattr(self, f"{name}_q") - w.detach())

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Map x (B, S, D), ids (B, S) -> output (B, S, D), tokens per expert (E,)."""
        shape = self.shape
        with torch.autocast(x.device.type, enabled=False):
            score = F.softplus(F.linear(x.float(), self.router)).sqrt()
            if self.hashed:
                top = self.tid2eid[ids]
            else:
                top = (score.detach() + self.bias).topk(shape.experts_used, -1).indices
            chosen = torch.zeros_like(score).scatter(-1, top, 1.0)
            weight = score * chosen
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * shape.expert_scale
        e, f, d = shape.experts, shape.expert_dim, shape.dim
        dtype = compute_dtype(x)
        a = x.to(dtype) @ self._weight("gate").to(dtype).reshape(e * f, d).T
        b = x.to(dtype) @ self._weight("up").to(dtype).reshape(e * f, d).T
        h = self._act(a, b).unflatten(-1, (e, f)) * weight.unsqueeze(-1)
        down = self._weight("down").to(dtype).permute(0, 2, 1).reshape(e * f, d)
        routed = h.flatten(-2).to(dtype) @ down
        shared = self.shared_down(self._act(self.shared_gate(x), self.shared_up(x)).to(dtype))
        return routed + shared, chosen.sum((0, 1))

    def _act(self, a: Tensor, b: Tensor) -> Tensor:
        limit = self.shape.clamp
        return F.silu(a.float().clamp(max=limit)) * b.float().clamp(-limit, limit)


def hash_table(shape: Shape, layer: int) -> Tensor:
    """A balanced table (vocab, used) of distinct experts per token id, fixed by the layer."""
    gen = torch.Generator().manual_seed(1000 + layer)
    order = torch.randperm(shape.vocab, generator=gen)
    table = torch.empty(shape.vocab, shape.experts_used, dtype=torch.long)
    for i, token in enumerate(order.tolist()):
        if i * shape.experts_used % shape.experts == 0:
            deck = torch.randperm(shape.experts, generator=gen)
        at = i * shape.experts_used % shape.experts
        table[token] = deck[at : at + shape.experts_used]
    return table


class Block(nn.Module):
    """One layer: attention, then experts, each between a read and a write of the streams."""

    def __init__(self, shape: Shape, layer: int, dropout: float) -> None:
        """Create the parameters."""
        super().__init__()
        self.attn_hc, self.ffn_hc = HyperConnection(shape, layer), HyperConnection(shape, layer)
        self.attn_norm = nn.Parameter(torch.ones(shape.dim))
        self.ffn_norm = nn.Parameter(torch.ones(shape.dim))
        self.attn, self.ffn = Attention(shape, layer), Experts(shape, layer)
        self.dropout = dropout

    def forward(
        self, x: Tensor, ids: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map x (B, S, n, D) -> x, indexer loss, tokens per expert (E,)."""
        dtype = compute_dtype(x)
        u, post, comb = self.attn_hc(x)
        y, aux = self.attn(rms(u, self.attn_norm).to(dtype), cos, sin)
        x = HyperConnection.merge(x, F.dropout(y, self.dropout, self.training), post, comb)
        u, post, comb = self.ffn_hc(x)
        y, load = self.ffn(rms(u, self.ffn_norm).to(dtype), ids)
        x = HyperConnection.merge(x, F.dropout(y, self.dropout, self.training), post, comb)
        return x, aux, load


class Tales(nn.Module):
    """The whole model."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        """Create the parameters."""
        super().__init__()
        self.shape, self.dropout = shape, dropout
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.blocks = nn.ModuleList(Block(shape, i, dropout) for i in range(shape.layers))
        self.hc_fn = nn.Parameter(torch.randn(shape.streams, shape.streams * shape.dim) * 0.02)
        self.hc_base = nn.Parameter(torch.zeros(shape.streams))
        self.hc_scale = nn.Parameter(torch.full((1,), 0.1))
        self.norm = nn.Parameter(torch.ones(shape.dim))
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and name != "head":
                gain = 0.5 if name.endswith(("o_b", "shared_down")) else 1.0
                nn.init.normal_(module.weight, std=gain * module.in_features**-0.5)
        pos = torch.arange(shape.context, dtype=torch.float64)
        for kind in (0, 1):
            angle = pos[:, None] * rope_frequencies(shape, bool(kind))
            self.register_buffer(f"cos{kind}", angle.cos().float(), persistent=False)
            self.register_buffer(f"sin{kind}", angle.sin().float(), persistent=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map ids (B, S) -> logits (B, S, vocab), indexer loss, tokens per expert (layers, E)."""
        s = ids.shape[1]
        e = F.dropout(self.embed(ids), self.dropout, self.training).float()
        x = e.unsqueeze(2).expand(-1, -1, self.shape.streams, -1)
        aux, loads = [], []
        for ratio, block in zip(self.shape.ratios, self.blocks, strict=True):
            cos = getattr(self, f"cos{int(ratio > 0)}")[:s]
            sin = getattr(self, f"sin{int(ratio > 0)}")[:s]
            x, a, load = block(x, ids, cos, sin)
            aux.append(a)
            loads.append(load)
        with torch.autocast(x.device.type, enabled=False):
            m = F.linear(rms(x.flatten(2)), self.hc_fn)
            c = torch.sigmoid(m * self.hc_scale + self.hc_base) + EPS
            u = rms((c.unsqueeze(-1) * x).sum(2), self.norm)
        return self.head(u), torch.stack(aux).sum(), torch.stack(loads)
