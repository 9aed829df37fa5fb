"""The plot of `ds4-bench`: two rates over context, as one self-contained SVG."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from ds4.frontends.frontiers import Frontier

__all__ = ["plot_svg"]

_WIDTH, _HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 40, 40


def plot_svg(rows: Sequence[Frontier], sessions: int) -> str:
    """SVG of prefill and decode rates, tokens per second of all sessions together.

    Each rate has a panel of its own, since they differ by orders of magnitude. Panels start at 0.
    """
    panels = [("prefill", [(r.ctx_tokens, r.prefill_rate(sessions)) for r in rows])]
    if any(r.steps_s for r in rows):
        panels.append(("decode", [(r.ctx_tokens, r.decode_rate(sessions)) for r in rows]))
    height = _HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for index, (title, points) in enumerate(panels):
        parts.append(f'<g transform="translate(0 {index * _HEIGHT})">')
        parts += _panel(f"{title}, tokens/s, {sessions} session{'s' * (sessions > 1)}", points)
        parts.append("</g>")
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _panel(title: str, points: Sequence[tuple[int, float]]) -> list[str]:
    top_x = max(x for x, _ in points)
    top_y = max((y for _, y in points), default=0.0) * 1.1 or 1.0
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + width * x / top_x, _TOP + height * (1 - y / top_y)

    parts = [f'<text x="{_LEFT}" y="24" font-size="14">{escape(title)}</text>']
    for i in range(5):
        value = top_y * i / 4
        _, y = place(0, value)
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.5g}</text>'
        )
        x, _ = place(top_x * i / 4, 0)
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - 16}" text-anchor="middle">{top_x * i // 4}</text>'
        )
    line = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#1565c0" stroke-width="2"/>')
    for x, y in points:
        px, py = place(x, y)
        parts.append(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="#1565c0">'
            f"<title>{x} tokens: {y:.2f}</title></circle>"
        )
    return parts
