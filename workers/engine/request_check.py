"""What every number of a request must be before it becomes an entry of an array: a bad one would end the engine.

The ingress refuses such requests with a status; this is for what comes over a channel from anyone else.
"""

import math

from pdserve.cluster.base.errors import InvalidRequestError
from pdserve.cluster.base.request import Request

MAX_SEED = (1 << 64) - 1
MAX_INT32 = (1 << 31) - 1


def are_tokens(token_ids: tuple[int, ...], vocab_size: int) -> bool:
    """True if all are ids of a vocabulary."""
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)


def check_numbers(request: Request, vocab_size: int) -> None:
    """Raise InvalidRequestError that names the field whose number cannot be."""
    sampling = request.sampling
    biased = tuple(bias.token_id for bias in sampling.logit_bias)
    for name, token_ids in (
        ("prompt", request.prompt_token_ids),
        ("resume_token_ids", request.resume_token_ids),
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", biased),
    ):
        if not are_tokens(token_ids, vocab_size):
            raise InvalidRequestError(f"{name} has a token that is none of the {vocab_size} of the model", param=name)
    for name, number, most in (
        ("seed", sampling.seed, MAX_SEED),
        ("sample", request.sample, MAX_INT32),
        ("top_k", sampling.top_k, MAX_INT32),
        ("max_tokens", sampling.max_tokens, MAX_INT32),
        ("min_tokens", sampling.min_tokens, MAX_INT32),
        ("logprobs", sampling.num_logprobs or 0, vocab_size),
        ("prompt_logprobs", sampling.num_prompt_logprobs or 0, vocab_size),
    ):
        if not 0 <= number <= most:
            raise InvalidRequestError(f"{name} {number} is not between 0 and {most}", param=name)
    reals = (
        ("temperature", sampling.temperature),
        ("top_p", sampling.top_p),
        ("min_p", sampling.min_p),
        ("frequency_penalty", sampling.frequency_penalty),
        ("presence_penalty", sampling.presence_penalty),
        ("repetition_penalty", sampling.repetition_penalty),
        *(("logit_bias", bias.bias) for bias in sampling.logit_bias),
    )
    for field, real in reals:
        if not math.isfinite(real):
            raise InvalidRequestError(f"{field} {real} is not finite", param=field)
