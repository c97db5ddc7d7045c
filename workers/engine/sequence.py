"""A sequence: the engine's side of one request.

Mutable, owned by the scheduler. Life: WAITING ⇄ RUNNING → FINISHED (a preempted sequence waits again). Fields and who
fills them: everything at arrival; `slot` and `blocks` at admission; `num_computed_tokens` and `tokens` after each step.
`first_blocks` is, per KV group, the first block that may still be held: a window has left those before it. `chain`
names the whole blocks of what is known (as far as it was asked for), from `root` on; `num_cached_tokens` are the prompt
tokens that the first admission found in the prefix cache, `num_lost_tokens` those that the last preemption gave up;
`next_event_tokens` is how many computed tokens change which blocks are published or held; `blocked_time` is since when
it has not fitted.
A sequence that `is_prefill_only` ends with its first sampled token: another worker goes on.
"""

from enum import StrEnum

import numpy as np

from pdserve.cluster.base.prefix_hash import PrefixHash, extend_chain
from pdserve.cluster.base.request import Request, TokenLogprobs, forks_of
from pdserve.workers.engine.logit_rules import LogitRules

MOST_SCORED = 64
"""Tokens of a prompt that are scored in one step: each costs a row of logits."""


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
        "blocked_time",
        "blocks",
        "chain",
        "first_blocks",
        "forks",
        "is_prefill_only",
        "next_event_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_resume_tokens",
        "num_tokens",
        "prompt_logprobs",
        "request",
        "root",
        "rules",
        "slot",
        "state",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        *,
        num_groups: int,
        root: PrefixHash,
        rules: LogitRules | None,
        arrival_no: int,
        arrival_time: float,
        is_prefill_only: bool = False,
    ) -> None:
        prompt, resume = request.prompt_token_ids, request.resume_token_ids
        self.request = request
        self.is_prefill_only = is_prefill_only
        self.arrival_no = arrival_no
        self.arrival_time = arrival_time
        self.admitted_time: float | None = None
        self.state = SequenceState.WAITING
        self.num_prompt_tokens = len(prompt)
        self.num_resume_tokens = len(resume)
        self.num_tokens = len(prompt) + len(resume)
        self.tokens = np.empty(self.num_tokens + 1 if is_prefill_only else worst_case_tokens(request), np.int32)
        self.tokens[: self.num_tokens] = prompt + resume
        self.num_computed_tokens = 0
        self.slot: int | None = None
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.first_blocks = [0] * num_groups
        self.root = root
        self.chain: list[PrefixHash] = []
        self.num_published_blocks = 0
        self.next_event_tokens = 0
        self.num_cached_tokens = 0
        self.num_lost_tokens = 0
        self.forks = [] if is_prefill_only else forks_of(request)
        self.blocked_time: float | None = None
        self.rules = rules
        self.prompt_logprobs: list[TokenLogprobs] = []

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, resume tokens counted."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens whose KV is not computed yet; 1 means the sequence decodes."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_unscored_tokens(self) -> int:
        """Prompt tokens whose log probability is still wanted."""
        if self.request.sampling.num_prompt_logprobs is None or self.num_resume_tokens:
            return 0
        return self.num_prompt_tokens - 1 - len(self.prompt_logprobs)

    def next_chunk(self, budget: int) -> int:
        """Return how many tokens a step of `budget` takes of it."""
        if self.num_unscored_tokens:
            return min(self.num_remaining_tokens, budget, MOST_SCORED)
        return min(self.num_remaining_tokens, budget)

    def names(self, num_tokens: int, block_size: int) -> list[PrefixHash]:
        """Return the names of the whole blocks of the first `num_tokens`."""
        extend_chain(self.chain, self.root, self.tokens, num_tokens, block_size)
        return self.chain[: num_tokens // block_size]

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.rules is not None:
            self.rules.append(token_id)


def worst_case_tokens(request: Request) -> int:
    """Return the most tokens that the request can ever hold, the last sampled one included."""
    return len(request.prompt_token_ids) + request.sampling.max_tokens


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens`."""
    return -(-num_tokens // block_size)
