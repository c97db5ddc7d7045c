"""Turns what the scheduler has decided into the arrays of a plan."""

from collections.abc import Mapping

import numpy as np

from pdserve.workers.engine.plan import Int32, ScoredTokens, StepPlan
from pdserve.workers.engine.row_tables import RowTables
from pdserve.workers.engine.sequence import Sequence


def build_plan(planned: Mapping[Sequence, int], tables: RowTables) -> tuple[StepPlan, list[Sequence]]:
    """Return the plan of the next tokens of each sequence, in order, and whose prompt tokens it scores.

    Args:
        planned: running sequences → how many tokens of each.
    """
    rows = list(planned.items())
    # One pass over the sequences; the rest is arithmetic on arrays.
    table = np.array(
        [
            (length, sequence.num_computed_tokens, sequence.num_tokens, sequence.num_prompt_tokens, sequence.slot)
            for sequence, length in rows
        ],
        np.int64,
    )
    lengths, firsts, num_tokens, num_prompt, slots = table.T
    row_starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=row_starts[1:])
    if row_starts[-1] == len(rows):
        positions = firsts.astype(np.int32)
        token_ids = np.array([sequence.tokens[sequence.num_computed_tokens] for sequence, _ in rows], np.int32)
    else:
        positions = np.arange(row_starts[-1], dtype=np.int32) + np.repeat(firsts - row_starts[:-1], lengths)
        token_ids = np.concatenate(
            [
                sequence.tokens[sequence.num_computed_tokens : sequence.num_computed_tokens + length]
                for sequence, length in rows
            ]
        )
    samples = np.flatnonzero(firsts + lengths == num_tokens)
    rules = tuple(
        (place, sequence.rules.row(sequence.num_output_tokens))
        for place, sequence in enumerate(rows[row][0] for row in samples.tolist())
        if sequence.rules is not None
    )
    scored, whose = _scored_tokens(rows, row_starts)
    plan = StepPlan(
        token_ids=token_ids,
        positions=positions.astype(np.int32, copy=False),
        row_starts=row_starts,
        block_tables=tables.block_tables(slots, max(len(sequence.blocks[0]) for sequence, _ in rows)),
        sample_rows=samples.astype(np.int32),
        sampling=tables.sampling(slots[samples], (num_tokens - num_prompt)[samples], rules),
        scored=scored,
    )
    return plan, whose


def _scored_tokens(rows: list[tuple[Sequence, int]], row_starts: Int32) -> tuple[ScoredTokens | None, list[Sequence]]:
    """Return the prompt tokens whose log probability is wanted, and whose each is."""
    tokens: list[int] = []
    targets: list[int] = []
    whose: list[Sequence] = []
    for row, (sequence, num_scheduled) in enumerate(rows):
        if not sequence.num_unscored_tokens:
            continue
        first = sequence.num_computed_tokens
        # The state of a token scores the one behind it; what an earlier admission has scored is kept.
        start = max(first, len(sequence.prompt_logprobs))
        end = min(first + num_scheduled, sequence.num_prompt_tokens - 1)
        for place in range(start, end):
            tokens.append(int(row_starts[row]) + place - first)
            targets.append(int(sequence.tokens[place + 1]))
            whose.append(sequence)
    if not tokens:
        return None, []
    num_top = [sequence.request.sampling.num_prompt_logprobs for sequence in whose]
    scored = ScoredTokens(
        tokens=np.array(tokens, np.int32), targets=np.array(targets, np.int32), num_top=np.array(num_top, np.int32)
    )
    return scored, whose
