"""Every form of request uses the prefill worker, over HTTP, on a real tiny model: none falls through."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.cluster.base.config import TransportKind
from pdserve.workers.worker import Worker
from support.bits import plain_engine
from support.checkpoints import make_tokenizer
from support.engines import make_engine
from support.pairs import assert_clean, has_link, transfer_config
from support.services import eventually, running_controller, running_ingress, running_worker

PROMPT = "The quick brown fox jumps over a lazy dog"


@dataclass
class Served:
    """A pair behind an ingress."""

    client: httpx.AsyncClient
    prefill: Worker
    decode: Worker


@pytest.fixture
async def served(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> AsyncIterator[Served]:
    make_tokenizer().save_pretrained(str(tmp_path))
    assembled = make_engine(tiny_checkpoints["qwen2"])
    prefill, decode = plain_engine(assembled), plain_engine(assembled)
    transfer = transfer_config(TransportKind.SHM)
    async with (
        running_controller() as controller,
        running_worker(controller, prefill, "prefill-0", stores=(prefill.runner.store,), transfer=transfer) as source,  # type: ignore[attr-defined]
        running_worker(controller, decode, "decode-0", stores=(decode.runner.store,), transfer=transfer) as sink,  # type: ignore[attr-defined]
        running_ingress(controller, tmp_path) as client,
    ):
        await eventually(lambda: has_link(sink), "linked")
        yield Served(client, source, sink)


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "a string": (COMPLETIONS, {"prompt": PROMPT}),
    "strings": (COMPLETIONS, {"prompt": [PROMPT, f"{PROMPT} again"]}),
    "token ids": (COMPLETIONS, {"prompt": list(range(20, 60))}),
    "streamed": (COMPLETIONS, {"prompt": PROMPT, "stream": True}),
    "samples": (COMPLETIONS, {"prompt": PROMPT, "n": 2, "temperature": 1.0}),
    "echo": (COMPLETIONS, {"prompt": PROMPT, "echo": True}),
    "log probabilities": (COMPLETIONS, {"prompt": PROMPT, "logprobs": 2}),
    "a scored prompt": (COMPLETIONS, {"prompt": PROMPT, "echo": True, "logprobs": 2}),
    "one token": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1}),
    "min_tokens and a seed": (COMPLETIONS, {"prompt": PROMPT, "min_tokens": 5, "seed": 3, "temperature": 1.0}),
    "a stop string": (COMPLETIONS, {"prompt": PROMPT, "stop": ["zzz"]}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": PROMPT}]}),
    "chat, streamed": (CHAT, {"messages": [{"role": "user", "content": PROMPT}], "stream": True}),
    "chat, max_completion_tokens": (
        CHAT,
        {"messages": [{"role": "user", "content": PROMPT}], "max_completion_tokens": 4, "max_tokens": None},
    ),
}


@pytest.mark.parametrize("form", FORMS)
async def test_the_prompt_is_computed_by_the_prefill_worker(served: Served, form: str) -> None:
    # known_faults B075, B076, B078
    path, fields = FORMS[form]
    payload = {"model": "tiny", "max_tokens": 6, "ignore_eos": True, "temperature": 0, **fields}
    answer = await served.client.post(path, json={name: value for name, value in payload.items() if value is not None})
    assert answer.status_code == 200, answer.text
    await assert_clean(served.prefill, served.decode)
    prefilled, local = served.prefill.load(), served.decode.load()
    num_prompts = len(fields["prompt"]) if isinstance(fields.get("prompt"), list) and form == "strings" else 1
    assert prefilled.num_prefilled_tokens >= 8 * num_prompts
    # One token of each prompt is sampled there, never more.
    assert prefilled.num_generated_tokens == num_prompts
    # Samples beyond the first compute the prompt's last token again, to draw from a stream of their own.
    assert local.num_prefilled_tokens == (1 if form == "samples" else 0)
