"""What a request changes in its logits before a token is taken: penalties, biases, end tokens that come too early.

`LogitRules` belongs to a sequence and follows its output; `RowRules` is what one step needs of it, arrays only.
"""

from collections.abc import Sequence

import numpy as np

from pdserve.cluster.base.request import SamplingParams
from pdserve.workers.engine.plan import Float32, Int32, RowRules


def has_rules(sampling: SamplingParams) -> bool:
    """True if the parameters change logits."""
    return bool(
        sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.logit_bias
        or sampling.min_tokens
    )


class LogitRules:
    """The rules of one sequence, and the counts that they need."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
    ) -> None:
        self._sampling = sampling
        self._early_ends = np.array(sorted({*eos_token_ids, *sampling.stop_token_ids}), np.int32)
        self._bias_ids = np.array([bias.token_id for bias in sampling.logit_bias], np.int32)
        self._biases = np.array([bias.bias for bias in sampling.logit_bias], np.float32)
        self._counts = _Counts()
        self._seen = _Counts()
        if sampling.repetition_penalty != 1.0:
            for token_id in prompt_token_ids:
                self._seen.add(token_id)
        for token_id in output_token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Count an output token."""
        if self._sampling.frequency_penalty or self._sampling.presence_penalty:
            self._counts.add(token_id)
        if self._sampling.repetition_penalty != 1.0:
            self._seen.add(token_id)

    def row(self, num_output_tokens: int) -> RowRules:
        """Return what applies to the next token. Its arrays are valid until the next `append`."""
        sampling = self._sampling
        is_early = num_output_tokens < sampling.min_tokens
        return RowRules(
            repetition=sampling.repetition_penalty,
            seen_ids=self._seen.ids,
            frequency=sampling.frequency_penalty,
            presence=sampling.presence_penalty,
            output_ids=self._counts.ids,
            output_counts=self._counts.counts,
            bias_ids=self._bias_ids,
            biases=self._biases,
            banned_ids=self._early_ends if is_early else self._early_ends[:0],
        )


def apply_rules(logits: Float32, rules: RowRules) -> None:
    """Change logits [V] in place: repetition, then frequency and presence, then biases, then bans.

    repetition_penalty (Keskar et al. 2019) divides what is positive and multiplies what is negative, for every token
    of prompt and output. frequency and presence penalties are OpenAI's: logit - count × frequency - presence, for
    tokens of the output.
    """
    if len(rules.seen_ids):
        seen, factor = logits[rules.seen_ids], np.float32(rules.repetition)
        logits[rules.seen_ids] = np.where(seen > 0, seen / factor, seen * factor)
    if len(rules.output_ids):
        penalty = rules.output_counts * rules.frequency + rules.presence
        logits[rules.output_ids] -= penalty.astype(np.float32)
    if len(rules.bias_ids):
        logits[rules.bias_ids] += rules.biases
    logits[rules.banned_ids] = -np.inf


class _Counts:
    """Distinct ids in order of their first occurrence, with counts, in arrays that grow."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.empty(16, np.int32)
        self._counts = np.empty(16, np.int32)

    @property
    def ids(self) -> Int32:
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Int32:
        return self._counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        place = self._places.get(token_id)
        if place is not None:
            self._counts[place] += 1
            return
        place = self._places[token_id] = len(self._places)
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
        self._ids[place], self._counts[place] = token_id, 1
