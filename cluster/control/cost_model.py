"""Predictions of durations from the workers' fitted laws, vectorised: every argument is an array or a number. Seconds.

A step takes base + per_token · tokens + per_row · rows + per_context · context + per_pair · pairs (see StepFit); a
prompt is computed in steps of at most `budget` tokens; a transfer takes its bytes by the measured rate of its link.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepLaw:
    """The terms of workers, [workers] each."""

    base: Values
    per_token: Values
    per_row: Values
    per_context: Values
    per_pair: Values

    def decode_step_s(self, rows: Values, context: Values) -> Values:
        """Return what a step takes that computes one token for each of `rows` with `context` tokens together."""
        return self.base + self.beside_s(rows, context)

    def row_s(self, context: float) -> Values:
        """Return what one more sequence of so much context adds to a decode step."""
        return self.per_token + self.per_row + self.per_context * context

    def prompt_s(self, num_tokens: Values, num_cached: Values) -> Values:
        """Return the work of computing `num_tokens` behind `num_cached`, without what each step costs anyway."""
        pairs = num_tokens * (num_cached + num_tokens / 2)
        return self.per_token * num_tokens + self.per_pair * pairs

    def steps_s(self, num_tokens: Values, budget: Values, beside: Values | float = 0.0) -> Values:
        """Return what the steps cost that `num_tokens` need, apart from them: `beside` is what else each computes."""
        return np.ceil(num_tokens / np.maximum(budget, 1.0)) * (self.base + self.per_row + beside)

    def beside_s(self, rows: Values, context: Values) -> Values:
        """Return what rows that decode add to a step that is made anyway."""
        return (self.per_token + self.per_row) * rows + self.per_context * context
