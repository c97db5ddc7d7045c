"""Linear laws of durations, fitted online: what a step takes, what a transfer takes.

Recursive least squares of relative errors with exponential forgetting (Ljung 1999, ch. 11), in its information form: a
few multiplications an observation, the equations are solved when somebody asks. A weak pull to a prior keeps terms sane
that nothing has shown yet (ridge regression, Hoerl and Kennard 1970). No coefficient is negative: terms that would be
are left out (an active set, as Lawson and Hanson 1974 do).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

FORGETTING, QUICK_FORGETTING = 0.995, 0.95
DOUBT = 0.5
"""With a mean error above it the law has changed, and old observations fade quickly (Fortescue et al. 1981)."""
PULL = 1e-6
ERROR_MEMORY = 0.95
LEAST_VALUE = 1e-6


class OnlineFit:
    """value = Σ coefficient_i · amount_i.

    Attributes:
        prior: coefficients to begin with, in the scaled amounts.
        num_observations: how many count, old ones less: at most 1 / (1 - FORGETTING).
        relative_error: mean of |predicted / observed - 1|, each predicted before it was observed; 1 at first.
    """

    def __init__(self, scales: Sequence[float]) -> None:
        """`scales`: amounts are counted in these units, so that the terms are of one size."""
        self.scales = np.array(scales, np.float64)
        self.prior = np.zeros(len(scales))
        self.num_observations = 0.0
        self.relative_error = 1.0
        self._moments = np.zeros((len(scales), len(scales)))
        self._targets = np.zeros(len(scales))
        self._doubt = 0.0
        self._solved: Float64 | None = None
        self._last_solved: Float64 | None = None

    def begin_with(self, coefficients: Sequence[float]) -> None:
        """Set the prior, in plain units."""
        self.prior = np.array(coefficients, np.float64) * self.scales
        self._solved = None

    def observe(self, amounts: Sequence[float] | Float64, value: float) -> None:
        """Take one observation in; `value` is positive."""
        x = np.asarray(amounts, np.float64) / self.scales
        value = max(value, LEAST_VALUE)
        if self._last_solved is not None:
            error = min(1.0, abs(float(self._last_solved @ x) / value - 1.0))
            self.relative_error = ERROR_MEMORY * self.relative_error + (1 - ERROR_MEMORY) * error
            self._doubt = ERROR_MEMORY * self._doubt + (1 - ERROR_MEMORY) * error
        weight = 1.0 / value**2
        kept = QUICK_FORGETTING if self._doubt > DOUBT else FORGETTING
        self._moments = kept * self._moments + weight * np.outer(x, x)
        self._targets = kept * self._targets + weight * value * x
        self.num_observations = kept * self.num_observations + 1.0
        self._solved = None

    @property
    def coefficients(self) -> Float64:
        """The coefficients in plain units, none negative."""
        plain: Float64 = self._scaled() / self.scales
        return plain

    def predict(self, amounts: Sequence[float] | Float64) -> float:
        """Return the fitted value."""
        return float(self._scaled() @ (np.asarray(amounts, np.float64) / self.scales))

    def _scaled(self) -> Float64:
        if self._solved is None:
            self._solved = self._last_solved = self._solve()
        return self._solved

    def _solve(self) -> Float64:
        pull = PULL * (np.trace(self._moments) + 1.0)
        moments = self._moments + pull * np.eye(len(self.scales))
        targets = self._targets + pull * self.prior
        found = np.linalg.solve(moments, targets)
        terms = np.arange(len(found))
        while len(terms) and (found < 0.0).any():
            terms = np.delete(terms, np.argmin(found))
            found = np.linalg.solve(moments[np.ix_(terms, terms)], targets[terms])
        whole = np.zeros(len(self.scales))
        whole[terms] = found
        return whole
