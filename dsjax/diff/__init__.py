"""Where two settings (plans, dtypes, meshes, checkpoints) begin to differ: tracing the values between segments."""

from dsjax.diff.compare import Comparison, SegmentDiff, ValueDiff, compare
from dsjax.diff.trace import ForcedTokens, Trace, continue_prompts, trace

__all__ = ["Comparison", "ForcedTokens", "SegmentDiff", "Trace", "ValueDiff", "compare", "continue_prompts", "trace"]
