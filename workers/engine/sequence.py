"""A sequence: the engine's side of one request.

Mutable, owned by the scheduler. Life: WAITING ⇄ RUNNING → FINISHED (a preempted sequence waits again). Fields and who
fills them: everything at arrival; `slot` and `blocks` at admission; `num_computed_tokens` and `tokens` after each step.
A sequence that `is_prefill_only` ends with its first sampled token: another worker goes on.
"""

from enum import StrEnum

import numpy as np

from pdserve.cluster.base.request import Request


class SequenceState(StrEnum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens, progress and blocks of one request."""

    __slots__ = (
        "admitted_time",
        "arrival_no",
        "arrival_time",
        "blocks",
        "is_prefill_only",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "request",
        "slot",
        "state",
        "tokens",
    )

    def __init__(
        self, request: Request, *, num_groups: int, arrival_no: int, arrival_time: float, is_prefill_only: bool = False
    ) -> None:
        prompt, resume = request.prompt_token_ids, request.resume_token_ids
        self.request = request
        self.is_prefill_only = is_prefill_only
        self.arrival_no = arrival_no
        self.arrival_time = arrival_time
        self.admitted_time: float | None = None
        self.state = SequenceState.WAITING
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = len(prompt) + len(resume)
        self.tokens = np.empty(self.num_tokens + 1 if is_prefill_only else worst_case_tokens(request), np.int32)
        self.tokens[: self.num_tokens] = prompt + resume
        self.num_computed_tokens = 0
        self.slot: int | None = None
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, resume tokens counted."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens whose KV is not computed yet; 1 means the sequence decodes."""
        return self.num_tokens - self.num_computed_tokens

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1


def worst_case_tokens(request: Request) -> int:
    """Return the most tokens that the request can ever hold, the last sampled one included."""
    return len(request.prompt_token_ids) + request.sampling.max_tokens


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens`."""
    return -(-num_tokens // block_size)
