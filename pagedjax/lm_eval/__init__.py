"""The model "pagedjax" of EleutherAI's lm-evaluation-harness: importing this registers it. See docs/evaluation.md."""

from __future__ import annotations

try:
    import lm_eval  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "pagedjax.lm_eval needs the lm-evaluation-harness, which is not installed: pip install 'pagedjax[lm-eval]'"
    ) from error

from pagedjax.lm_eval.model import PagedJaxLM

__all__ = ["PagedJaxLM"]
