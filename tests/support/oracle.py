"""transformers in fp32, which says what greedy tokens are right."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

TIE = 1e-4
"""Logits so close may be taken in either order."""


def oracle(folder: Path) -> PreTrainedModel:
    """Return transformers' model of a checkpoint."""
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True).eval()


def expected_tokens(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the greedy continuation of a prompt."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=2,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def assert_greedy(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> None:
    """Every token has the oracle's largest logit after the same history, up to a tie."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    margins = logits.max(-1).values - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert margins.max() <= TIE, f"token {int(margins.argmax())} is {float(margins.max())} below the largest logit"
