"""Full-size models of random weights, for measurements: what frontends may ask for.

Nothing of CUDA is imported before a model is really made.
"""

from __future__ import annotations

import attrs

from ds4.executor import StepExecutor

__all__ = ["SyntheticModel", "open_synthetic"]


@attrs.frozen(kw_only=True)
class SyntheticModel:
    """A model without a file or a tokenizer.

    Attributes:
      executor: with its kernels compiled.
      n_vocab: vocabulary size.
      plan: the memory plan as text.
    """

    executor: StepExecutor
    n_vocab: int
    plan: str


def open_synthetic(name: str, *, n_ctx: int, sessions: int, quality: bool) -> SyntheticModel:
    """Make a model of random weights on the CUDA device.

    Args:
      name: `deepseek4-flash`.
      n_ctx: longest session.
      sessions: sessions open at once.
      quality: exact kernels only.

    Raises:
      ConfigError: no such model, or CUDA cannot run here.
      OutOfDeviceMemory: it does not fit; the text has the arithmetic.
    """
    from ds4.cuda.device import require_packages

    require_packages()
    from ds4.cuda.executor import CudaExecutor, CudaOptions
    from ds4.cuda.synthetic import SyntheticSource

    source = SyntheticSource(name)
    options = CudaOptions(max_context=n_ctx, max_sessions=sessions, exact=quality)
    executor = CudaExecutor(source, f"synthetic {name}".encode(), options=options)
    executor.warm_up()
    return SyntheticModel(
        executor=executor, n_vocab=source.shape.n_vocab, plan=executor.memory_plan.text()
    )
