"""The output head: hidden states to logits, in fixed vocabulary tiles.

Greedy rows need no logits in memory: a running maximum over the tiles is enough. Other rows get their whole row of
logits. Ties break by the lower token id. The tile size is fixed, so a row's result does not depend on its batch. With
tensor parallelism each rank has the tiles of its tokens; rank 0 takes the tokens, the others only `follow`.
"""

from collections.abc import Iterator

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.cluster.base.request import TokenLogprobs
from pdserve.workers.engine.logit_rules import apply_rules
from pdserve.workers.engine.logprobs import logprobs_of
from pdserve.workers.engine.plan import NO_TOKEN, Float32, Int32, SamplingArrays, ScoredTokens, StepOutput
from pdserve.workers.engine.sampler import row_maximum, sample_rows
from pdserve.workers.model.linear import Linear
from pdserve.workers.model.parallel import SOLO, RankGroup, part_of
from pdserve.workers.model.softcap import cap_rows

VOCABULARY_TILE = 16384
SCORED_ROWS = 16
"""Rows of logits that are held at once to score a prompt."""

Indexes = NDArray[np.intp]


@numba.njit(nogil=True, parallel=True, cache=True)
def _update_largest(logits, offset, largest, token_ids):  # type: ignore[no-untyped-def]  # numba infers the types
    for row in numba.prange(logits.shape[0]):
        best = row_maximum(logits[row])
        if best > largest[row]:
            for column in range(logits.shape[1]):
                if logits[row, column] == best:
                    largest[row], token_ids[row] = best, offset + column
                    break


def _zero_where_not_finite(hidden: torch.Tensor) -> tuple[torch.Tensor, NDArray[np.bool_]]:
    """Return hidden [S, H] with rows that hold NaN or inf as zeros, and which rows are finite, [S]."""
    is_finite = torch.isfinite(hidden).all(dim=1)
    flags: NDArray[np.bool_] = is_finite.cpu().numpy()
    return hidden if flags.all() else torch.where(is_finite[:, None], hidden, 0.0), flags


def rows_needed_whole(sampling: SamplingArrays) -> NDArray[np.bool_]:
    """Return which rows [S] need all of their logits, and not only the largest."""
    is_whole = ~sampling.is_greedy | (sampling.num_logprobs >= 0)
    for row, _ in sampling.rules:
        is_whole[row] = True
    return is_whole


class Head:
    """The head of a model on one rank, as packed tiles of VOCABULARY_TILE rows of its weight."""

    def __init__(self, tiles: list[Linear], vocab_size: int, *, softcap: float = 0.0, group: RankGroup = SOLO) -> None:
        """`tiles` are those of this rank's tokens (parallel.part_of); logits are capped by `softcap` unless it is 0."""
        self._tiles = tiles
        self._vocab_size = vocab_size
        self._softcap = np.float32(softcap)
        self._group = group
        parts = [part_of(vocab_size, rank, group.size) for rank in range(group.size)]
        self._first_token = parts[group.rank][0]
        self._widths = [end - first for first, end in parts]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [S, V] for hidden [S, H]; nothing on ranks other than 0."""
        return self._join(torch.cat([self._tile(tile, hidden) for tile in self._tiles], dim=1))

    def _tile(self, tile: Linear, hidden: torch.Tensor) -> torch.Tensor:
        logits = tile(hidden)
        if not self._softcap:
            return logits
        if logits.device.type != "cpu":
            return float(self._softcap) * torch.tanh(logits / float(self._softcap))
        cap_rows(logits.numpy(), self._softcap)
        return logits

    def _join(self, logits: torch.Tensor) -> torch.Tensor:
        """Return every rank's columns [S, V] side by side, on rank 0."""
        if self._group.size == 1:
            return logits
        widest = max(self._widths)
        parts = self._group.gather(torch.nn.functional.pad(logits, (0, widest - logits.shape[1])))
        if not parts:
            return logits[:0]
        return torch.cat([part[:, :width] for part, width in zip(parts, self._widths, strict=True)], dim=1)

    def sample(self, hidden: torch.Tensor, sampling: SamplingArrays) -> StepOutput:
        """Return one token id per row of hidden [S, H], and log probabilities where they are asked for; on rank 0.

        A row of hidden that is not finite has NO_TOKEN, and no log probabilities that mean anything.
        """
        hidden, is_finite = _zero_where_not_finite(hidden)
        token_ids, rows, whole = self._scan(hidden, rows_needed_whole(sampling))
        output = StepOutput(token_ids=token_ids)
        if len(whole):
            output = self._finish(rows, whole, token_ids, sampling)
        output.token_ids[~is_finite] = NO_TOKEN
        return output

    def follow(self, hidden: torch.Tensor, is_whole: NDArray[np.bool_]) -> None:
        """Do this rank's part of `sample` of rank 0."""
        self._scan(_zero_where_not_finite(hidden)[0], is_whole)

    def _scan(self, hidden: torch.Tensor, is_whole: NDArray[np.bool_]) -> tuple[Int32, Float32, Indexes]:
        """Return each row's token of the largest logit [S], and the whole logits of the rows that need them.

        Only on rank 0; on other ranks what is returned means nothing.
        """
        num_rows, group = hidden.shape[0], self._group
        whole = np.flatnonzero(is_whole)
        largest = np.full(num_rows, -np.inf, np.float32)
        token_ids = np.zeros(num_rows, np.int32)
        kept = np.empty((len(whole), self._widths[group.rank]), np.float32)
        rows = torch.from_numpy(kept)
        offset = 0
        if hidden.device.type == "cpu":
            for tile in self._tiles:
                logits = self._tile(tile, hidden).numpy()
                _update_largest(logits, self._first_token + offset, largest, token_ids)
                if len(whole):
                    np.take(logits, whole, axis=0, out=kept[:, offset : offset + tile.out_features], mode="clip")
                offset += tile.out_features
        else:
            found, ids, rows = self._scan_on_device(hidden, whole)
            largest, token_ids = found.cpu().numpy(), ids.cpu().numpy()
        if group.size > 1:
            # Both are exact in fp64.
            own = torch.from_numpy(np.stack([largest.astype(np.float64), token_ids])).to(hidden.device)
            for best, ids in (part.cpu().numpy() for part in group.gather(own)[1:]):
                is_larger = best > largest
                largest[is_larger], token_ids[is_larger] = best[is_larger], ids[is_larger]
            if len(whole):
                rows = self._join(rows)
        return token_ids, rows.cpu().numpy(), whole

    def _scan_on_device(self, hidden: torch.Tensor, whole: Indexes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the largest logit [S], the lowest token that has it [S], and the rows that are needed whole.

        Only these leave the device.
        """
        wanted = torch.from_numpy(whole).to(hidden.device)
        largest = torch.full((len(hidden),), -torch.inf, device=hidden.device)
        token_ids = torch.zeros(len(hidden), dtype=torch.int32, device=hidden.device)
        kept = []
        offset = self._first_token
        for tile in self._tiles:
            logits = self._tile(tile, hidden)
            best = logits.max(dim=1).values
            columns = torch.arange(offset, offset + tile.out_features, dtype=torch.int32, device=hidden.device)
            lowest = torch.where(logits == best[:, None], columns, columns[-1]).min(dim=1).values
            is_larger = best > largest
            token_ids = torch.where(is_larger, lowest, token_ids)
            largest = torch.where(is_larger, best, largest)
            kept.append(logits[wanted])
            offset += tile.out_features
        return largest, token_ids, torch.cat(kept, dim=1)

    def score(self, hidden: torch.Tensor, scored: ScoredTokens) -> tuple[TokenLogprobs, ...]:
        """Return the log probability of each scored token; hidden [Q, H] are the states before them. On rank 0."""
        scores: list[TokenLogprobs] = []
        wanted = zip(scored.targets.tolist(), scored.num_top.tolist(), strict=True)
        for part in self._score_parts(hidden):
            logits = part.cpu().numpy()
            scores.extend(logprobs_of(row, *next(wanted)) for row in logits)
        return tuple(scores)

    def follow_score(self, hidden: torch.Tensor) -> None:
        """Do this rank's part of `score` of rank 0."""
        for _ in self._score_parts(hidden):
            pass

    def _score_parts(self, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        hidden, _ = _zero_where_not_finite(hidden)
        for start in range(0, len(hidden), SCORED_ROWS):
            yield self.logits(hidden[start : start + SCORED_ROWS])

    def _finish(self, rows: Float32, whole: Indexes, token_ids: Int32, sampling: SamplingArrays) -> StepOutput:
        """Take tokens from whole rows of logits; `whole` are their places among the sampled rows."""
        rules = dict(sampling.rules)
        wanted = sampling.num_logprobs[whole]
        # Log probabilities are the model's own.
        originals = {
            place: rows[place].copy() for place, row in enumerate(whole) if wanted[place] >= 0 and row in rules
        }
        for place, row in enumerate(whole.tolist()):
            if row in rules:
                apply_rules(rows[place], rules[row])
                token_ids[row] = rows[place].argmax()
        drawn = np.flatnonzero(~sampling.is_greedy[whole])
        if len(drawn):
            token_ids[whole[drawn]] = sample_rows(rows[drawn], sampling, whole[drawn])
        if (wanted < 0).all():
            return StepOutput(token_ids=token_ids)
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        for place, row in enumerate(whole.tolist()):
            if wanted[place] >= 0:
                logits = originals.get(place, rows[place])
                logprobs[row] = logprobs_of(logits, int(token_ids[row]), int(wanted[place]))
        return StepOutput(token_ids=token_ids, logprobs=tuple(logprobs))
