"""How long steps take: measured, and fitted online (see OnlineFit), so that the next one can be predicted.

    seconds = a + b · tokens + c · rows + d · (context of rows with one token) + e · (pairs of the others)

A row that computes one token reads its context; one that computes several meets a query with a key so many times: both
in thousands.
"""

import math
from dataclasses import dataclass

from pdserve.cluster.base.online_fit import OnlineFit
from pdserve.cluster.base.worker_info import StepFit

SCALES = (1.0, 100.0, 10.0, 1000.0, 10000.0)
LEAST_PREFILL = 16
"""Prompt tokens that a step computes whatever the target: prompts must go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step's duration depends on."""

    num_tokens: int
    num_rows: int
    num_context_tokens: int
    """Of the rows that compute one token."""
    num_pairs: int = 0
    """Of a query with a key, in the other rows."""

    def amounts(self) -> tuple[float, float, float, float, float]:
        """Return what the terms of the law are multiplied with."""
        return 1.0, self.num_tokens, self.num_rows, self.num_context_tokens, self.num_pairs


class StepModel:
    """Duration of the last step, and what to expect of the next."""

    def __init__(self) -> None:
        self.last_s = 0.0
        self.mean_s = 0.0
        self.full_s = 0.0
        """A step that fills the token budget, measured at load."""
        self._law = OnlineFit(SCALES)

    @property
    def predicted_s(self) -> float:
        """The longest that the next step should take."""
        return max(self.last_s, self.mean_s, self.full_s)

    @property
    def fit(self) -> StepFit:
        """The present fit."""
        base, per_token, per_row, per_context, per_pair = self._law.coefficients.tolist()
        return StepFit(
            base=base,
            per_token=per_token,
            per_row=per_row,
            per_context_kilotoken=per_context * 1000,
            per_kilopair=per_pair * 1000,
            num_observations=self._law.num_observations,
            relative_error=self._law.relative_error,
        )

    def calibrate(self, token_s: float, max_batch_tokens: int) -> None:
        """Begin with the seconds that a token of prefill took at load."""
        self.full_s = token_s * max_batch_tokens
        self._law.begin_with((0.0, token_s, 0.0, 0.0, 0.0))

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """Take one measured step in; the mean forgets with factor 0.9."""
        self.last_s = duration_s
        self.mean_s = duration_s if self.mean_s == 0.0 else 0.9 * self.mean_s + 0.1 * duration_s
        self._law.observe(shape.amounts(), duration_s)

    def predict_s(self, shape: StepShape) -> float:
        """Return the fitted duration of a step."""
        return self._law.predict(shape.amounts())

    def budget(self, target_s: float, decoding: StepShape, most: int) -> int:
        """Return the largest token budget whose predicted step meets the target, LEAST_PREFILL prompt tokens at least.

        Args:
            decoding: the step with its decodes alone.
            most: never more than this.
        """
        per_token = float(self._law.coefficients[1])
        if per_token <= 0.0:
            return most
        left = (target_s - self.predict_s(decoding)) / per_token
        num_prefill = max(LEAST_PREFILL, math.floor(left))
        return max(1, min(most, decoding.num_tokens + num_prefill))
