"""How long steps take: measured, and fitted online, so that the next one can be predicted.

    seconds = a + b · tokens + c · rows + d · (tokens of context, in thousands)

Least squares of relative errors over the steps so far, older ones fading; a weak pull to what was measured at load
keeps terms sane that no step has shown yet (ridge regression, Hoerl and Kennard 1970). A few multiplications a step;
the four equations are solved when somebody asks.
"""

import math
from dataclasses import dataclass

import numpy as np

from pdserve.cluster.base.worker_info import StepFit
from pdserve.workers.engine.plan import Float64

FORGETTING = 0.995
PULL = 1e-6
SCALES = np.array([1.0, 100.0, 10.0, 1000.0])
"""Tokens, rows and context are counted in these units, so that the four terms are of one size."""
LEAST_PREFILL = 16
"""Prompt tokens that a step computes whatever the target: prompts must go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step's duration depends on."""

    num_tokens: int
    num_rows: int
    num_context_tokens: int

    def features(self) -> Float64:
        """Return [1, tokens, rows, context], each in its unit."""
        scaled: Float64 = np.array([1.0, self.num_tokens, self.num_rows, self.num_context_tokens]) / SCALES
        return scaled


class StepModel:
    """Duration of the last step, and what to expect of the next."""

    def __init__(self) -> None:
        self.last_s = 0.0
        self.mean_s = 0.0
        self.full_s = 0.0
        """A step that fills the token budget, measured at load."""
        self._prior = np.zeros(4)
        self._moments = np.zeros((4, 4))
        self._targets = np.zeros(4)
        self._solved: Float64 | None = None

    @property
    def predicted_s(self) -> float:
        """The longest that the next step should take."""
        return max(self.last_s, self.mean_s, self.full_s)

    @property
    def fit(self) -> StepFit:
        """The present fit."""
        base, per_token, per_row, per_context = (self._coefficients() / SCALES).tolist()
        return StepFit(base=base, per_token=per_token, per_row=per_row, per_context_kilotoken=per_context * 1000)

    def calibrate(self, token_s: float, max_batch_tokens: int) -> None:
        """Begin with the seconds that a token of prefill took at load."""
        self.full_s = token_s * max_batch_tokens
        self._prior[1] = token_s * SCALES[1]
        self._solved = None

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """Take one measured step in; the mean forgets with factor 0.9."""
        self.last_s = duration_s
        self.mean_s = duration_s if self.mean_s == 0.0 else 0.9 * self.mean_s + 0.1 * duration_s
        x = shape.features()
        weight = 1.0 / max(duration_s, 1e-6) ** 2
        self._moments = FORGETTING * self._moments + weight * np.outer(x, x)
        self._targets = FORGETTING * self._targets + weight * duration_s * x
        self._solved = None

    def _coefficients(self) -> Float64:
        """Return the coefficients of the scaled features, none negative."""
        found = self._solved
        if found is None:
            pull = PULL * (np.trace(self._moments) + 1.0) * np.eye(4)
            solved = np.linalg.solve(self._moments + pull, self._targets + pull @ self._prior)
            found = self._solved = np.maximum(solved, 0.0)
        return found

    def predict_s(self, shape: StepShape) -> float:
        """Return the fitted duration of a step."""
        return float(self._coefficients() @ shape.features())

    def budget(self, target_s: float, decoding: StepShape, most: int) -> int:
        """Return the largest token budget whose predicted step meets the target, LEAST_PREFILL prompt tokens at least.

        Args:
            decoding: the step with its decodes alone.
            most: never more than this.
        """
        per_token = self.fit.per_token
        if per_token <= 0.0:
            return most
        left = (target_s - self.predict_s(decoding)) / per_token
        num_prefill = max(LEAST_PREFILL, math.floor(left))
        return max(1, min(most, decoding.num_tokens + num_prefill))
