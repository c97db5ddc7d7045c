"""Joint placement fed by real workers over real channels: caches, refusals, reasons."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.config import PlacementConfig
from pdserve.cluster.base.prefix_hash import split_names
from pdserve.cluster.control.placement import JointPlacement
from pdserve.workers.worker import Worker
from support.checkpoints import make_tokenizer
from support.controllers import StubController
from support.engines import prompts_of
from support.runners import make_paced_engine
from support.services import MODEL, eventually, running_controller, running_ingress, running_worker

Served = tuple[httpx.AsyncClient, StubController, list[Worker]]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    make_tokenizer().save_pretrained(str(tmp_path))
    async with running_controller() as controller:
        controller.placement = JointPlacement(PlacementConfig(), SystemClock(), random.Random(1))
        async with (
            running_worker(controller, make_paced_engine(MODEL), "mixed-0") as first,
            running_worker(controller, make_paced_engine(MODEL), "mixed-1") as second,
            running_ingress(controller, tmp_path) as client,
        ):
            yield client, controller, [first, second]


def placement_of(controller: StubController) -> JointPlacement:
    assert isinstance(controller.placement, JointPlacement)
    return controller.placement


async def complete(client: httpx.AsyncClient, prompt: list[int], **headers: str) -> httpx.Response:
    payload = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 4}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await client.post("/v1/completions", json=payload, headers=named)


async def test_a_prompt_goes_to_the_worker_that_holds_its_beginning(served: Served) -> None:
    client, controller, workers = served
    placement = placement_of(controller)
    prefix, *tails = prompts_of((192, 20, 20, 20, 20), seed=5)
    await complete(client, prefix)
    holder = next(worker for worker in workers if worker.load().num_generated_tokens)
    await eventually(lambda: len(placement.index) == 12, "the events have come")
    for number, tail in enumerate(tails):
        # Until a report has counted the one before, that one seems to wait there.
        await eventually(lambda: not any(map(len, placement.fleet._reservations)), "reported")
        answer = (await complete(client, prefix + tail)).json()
        # All whole blocks of the prefix, whose last token is not the prompt's any more.
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 192, number
    assert [worker.load().num_generated_tokens > 0 for worker in workers].count(True) == 1
    assert holder.load().num_cached_prompt_tokens == 4 * 192
    # What the worker says again when it is asked is what it said bit by bit.
    told = {name for update in controller.cache_updates for name in split_names(update.stored)}
    before = len(placement.index)
    # As if a message had been lost.
    placement.index._sources[holder.worker_id].next_no = None
    placement.index._clear(placement.index._sources[holder.worker_id].bit)
    for prompt in prompts_of((40, 40, 40, 40), seed=6):
        await complete(client, prompt)
    await eventually(lambda: len(placement.index) > before, "a snapshot")
    assert told <= set(placement.index._holders)


async def test_a_request_that_would_be_late_is_refused_with_429(served: Served) -> None:
    client, controller, _ = served
    for prompt in prompts_of((60,) * 30, seed=7):
        await complete(client, prompt)

    def is_sure() -> bool:
        return all(view.load.step_fit.relative_error < 0.95 for view in placement_of(controller).fleet.views)

    await eventually(is_sure, "the laws are known")
    refused = await complete(client, prompts_of((600,), seed=8)[0], x_slo_ttft_ms="0.000001")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert error["code"] == "overloaded"
    assert "predicted after" in error["message"]
    assert (await complete(client, [7] * 600, x_slo_ttft_ms="60000")).status_code == 200
    assert (await complete(client, [7] * 600, x_slo_class="interactive")).status_code in (200, 429)
    bad = await complete(client, [7], x_slo_ttft_ms="soon")
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "x-slo-ttft-ms")


async def test_what_was_decided_can_be_asked_for(served: Served) -> None:
    client, _, _ = served
    answer = (await complete(client, list(range(20, 60)))).json()
    found = (await client.get(f"/cluster/requests/{answer['id']}")).json()
    (decision,) = found["decisions"]
    assert decision["num_prompt_tokens"] == 40
    chosen, other = decision["candidates"]
    assert (chosen["is_chosen"], other["is_chosen"]) == (True, False)
    assert chosen["owner"] in decision["reason"]
    assert {chosen["owner"], other["owner"]} == {"mixed-0", "mixed-1"}
    assert chosen["prefill"] is None
    assert chosen["ttft_s"] == pytest.approx(chosen["room_s"] + chosen["queue_s"] + chosen["compute_s"], abs=1e-5)
    missing = await client.get("/cluster/requests/cmpl-nobody")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "request_not_found"
