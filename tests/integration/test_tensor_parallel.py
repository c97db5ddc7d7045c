"""Tensor parallelism with ranks as threads: greedy tokens equal one rank's, equal numbers of ranks are bitwise."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pdserve.cluster.base.engine_config import EngineConfig, LinearKind
from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.cluster.base.request import Request, TokenBias, TokenDelta
from pdserve.cluster.base.worker_info import NumericsClass
from pdserve.workers.assembly import AssembledEngine
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.plan import ForwardPlan, StepOutput, StepPlan
from pdserve.workers.engine.rank_step import Copies, Exported, RankStep
from pdserve.workers.memory_plan import plan_memory
from pdserve.workers.model.families import read_spec
from pdserve.workers.model.runner import OnLayer, TransformerRunner
from support.bits import Logits, RecordingRunner, assert_same_bits, make_seeded_requests
from support.checkpoints import FAMILIES, make_config, save_checkpoint
from support.engines import make_engine, make_request, prompts_of, run
from support.gangs import running_gang
from support.oracle import assert_greedy, oracle

LENGTHS = (1, 15, 16, 17, 33, 70)
NUM_TOKENS = 24


def greedy_requests() -> list[Request]:
    return [make_request(str(i), prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(prompts_of(LENGTHS))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_greedy_tokens_equal_one_rank(shared_checkpoints: Callable[[str], Path], family: str, num_ranks: int) -> None:
    folder = shared_checkpoints(family)
    requests = greedy_requests()
    expected = run(make_engine(folder).engine, requests)
    with running_gang(folder, num_ranks) as gang:
        found = run(gang.assembled.engine, requests)
        assert gang.assembled.numerics.numerics_class is NumericsClass.BITWISE, gang.assembled.numerics.note
        # Each rank holds its share of the KV, and of the weights.
        heads = gang.assembled.store.layer(0).shape[2]
        assert all(other.store.layer(0).shape[2] == heads for other in gang.others)
        assert heads == max(1, gang.assembled.model.spec.num_kv_heads // num_ranks)
    model = oracle(folder)
    for request in requests:
        if found[request.request_id] != expected[request.request_id]:
            assert_greedy(model, list(request.prompt_token_ids), found[request.request_id])


@pytest.mark.parametrize(
    ("family", "linear", "kv_dtype"),
    [
        ("llama", LinearKind.FP16, KVDtype.FLOAT32),
        ("gemma3", LinearKind.FP32, KVDtype.INT8),
        ("mixtral", LinearKind.INT8, KVDtype.FLOAT16),
        ("gpt_oss", LinearKind.FP32, KVDtype.FLOAT32),
    ],
)
def test_a_gang_has_the_same_bits_in_any_batch(
    shared_checkpoints: Callable[[str], Path], family: str, linear: LinearKind, kv_dtype: KVDtype
) -> None:
    requests = make_seeded_requests()
    settings = {"linear": linear, "kv_dtype": kv_dtype}
    with running_gang(shared_checkpoints(family), 2, **settings) as gang:
        expected, texts = record_alone(gang.assembled, requests)
    for chunk, block_size in ((7, 16), (33, 32)):
        with running_gang(
            shared_checkpoints(family), 2, max_batch_tokens=chunk, block_size=block_size, max_running=5, **settings
        ) as gang:
            recorder = RecordingRunner(gang.assembled.runner)
            gang.assembled.engine.runner = recorder
            assert run(gang.assembled.engine, requests[::-1]) == texts
            assert_same_bits(recorder.logits, expected)


def record_alone(assembled: AssembledEngine, requests: list[Request]) -> tuple[Logits, dict[str, list[int]]]:
    recorder = RecordingRunner(assembled.runner)
    assembled.engine.runner = recorder
    texts: dict[str, list[int]] = {}
    for request in requests:
        texts |= run(assembled.engine, [request])
    return recorder.logits, texts


def test_preemption_and_the_host_tier_change_no_text_of_a_gang(shared_checkpoints: Callable[[str], Path]) -> None:
    # What is copied out of the pool and back is copied on every rank, in the order of the steps.
    folder = shared_checkpoints("gemma3")
    requests = make_seeded_requests((14, 20, 31, 40, 60, 90), max_tokens=50)
    with running_gang(folder, 2) as gang:
        expected = run(gang.assembled.engine, requests)
    with running_gang(folder, 2, kv_memory_gib=0.0003, host_memory_gib=0.02, max_batch_tokens=48) as gang:
        engine = gang.assembled.engine
        assert run(engine, requests) == expected
        assert engine.scheduler.num_preemptions > 0
        assert engine.host is not None
        assert engine.host.num_loaded_blocks > 0


def test_every_form_of_sampling_is_the_same_on_one_rank_and_on_more(
    shared_checkpoints: Callable[[str], Path],
) -> None:
    folder = shared_checkpoints("qwen3")
    prompts = prompts_of([20, 33, 40, 50, 60])
    requests = [
        make_request("greedy", prompts[0], num_logprobs=3),
        make_request("drawn", prompts[1], temperature=0.8, seed=3, top_k=40, num_logprobs=2),
        make_request(
            "penalised",
            prompts[2],
            frequency_penalty=1.0,
            repetition_penalty=1.2,
            logit_bias=(TokenBias(token_id=7, bias=3.0),),
        ),
        make_request("forked", prompts[3], temperature=0.9, seed=5, forks=2),
        make_request("scored", prompts[4], max_tokens=3, num_prompt_logprobs=2),
    ]
    expected = collect(make_engine(folder).engine, requests)
    with running_gang(folder, 2) as gang:
        found = collect(gang.assembled.engine, requests)
    assert found.keys() == expected.keys()
    for name, deltas in expected.items():
        assert [delta.token_ids for delta in found[name]] == [delta.token_ids for delta in deltas], name
        for delta, other in zip(found[name], deltas, strict=True):
            np.testing.assert_allclose(chosen_logprobs(delta), chosen_logprobs(other), atol=1e-4)
    assert any(len(delta.prompt_logprobs) == 59 for delta in found["scored"])


def collect(engine: Engine, requests: list[Request]) -> dict[str, list[TokenDelta]]:
    found: dict[str, list[TokenDelta]] = {}
    for request in requests:
        engine.scheduler.add(request)
    while engine.has_work:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
    return found


def chosen_logprobs(delta: TokenDelta) -> list[float]:
    return [entry.chosen.logprob for entry in (*delta.logprobs, *delta.prompt_logprobs)]


def test_ranks_agree_about_every_step(shared_checkpoints: Callable[[str], Path]) -> None:
    # B085: 60 requests that draw, with aborts at random steps; each rank notes what it is to compute, rank 0 too.
    seen: dict[int, list[int]] = {0: [], 1: [], 2: [], 3: []}

    def note(rank: int, step: RankStep) -> None:
        if step.forward is not None and not step.wants_logits:
            seen[rank].append(hash_of(step.forward))

    rng = np.random.default_rng(0)
    with running_gang(shared_checkpoints("llama"), 4, on_step=note, max_running=6, kv_memory_gib=0.01) as gang:
        engine = gang.assembled.engine
        for notes in seen.values():
            notes.clear()  # the self-test's
        engine.runner = NotingRunner(gang.assembled.runner, seen[0])
        for number, prompt in enumerate(prompts_of(rng.integers(1, 60, 60).tolist())):
            engine.scheduler.add(make_request(str(number), prompt, temperature=1.0, seed=number, max_tokens=20))
        while engine.has_work:
            engine.step()
            if rng.random() < 0.2:
                engine.scheduler.abort(RequestId(str(rng.integers(60))), 0)
            engine.scheduler.validate()
        assert engine.pool.is_all_free
    assert len(seen[0]) > 100
    assert seen[0] == seen[1] == seen[2] == seen[3]


def hash_of(plan: ForwardPlan) -> int:
    arrays = (plan.token_ids, plan.positions, plan.row_starts, *plan.block_tables)
    return hash(tuple(array.tobytes() for array in arrays))


class NotingRunner:
    """Notes the plans of rank 0. See ModelRunner."""

    def __init__(self, runner: TransformerRunner, seen: list[int]) -> None:
        self._runner = runner
        self._seen = seen

    def bind_thread(self) -> None:
        self._runner.bind_thread()

    def copy_block(self, group: int, source: int, target: int) -> None:
        self._runner.copy_block(group, source, target)

    def settle(self, copies: Copies) -> None:
        self._runner.settle(copies)

    def execute(
        self, plan: StepPlan, on_layer: OnLayer | None = None, exported: Exported = (), copies: Copies = ()
    ) -> StepOutput:
        self._seen.append(hash_of(plan))
        return self._runner.execute(plan, on_layer, exported, copies)


def test_a_step_without_logits_ends_when_every_rank_has_ended_it(shared_checkpoints: Callable[[str], Path]) -> None:
    # Else the blocks of a prompt that is dropped now could be bound to a transfer while a slow rank still writes.
    is_held, may_go = threading.Event(), threading.Event()
    last_layer = 3

    def hold(rank: int, step: RankStep) -> Callable[[int], None] | None:
        if step.forward is None or step.num_sampled or step.forward.num_tokens != 64:
            return None

        def on_layer(layer: int) -> None:
            if layer == last_layer:
                is_held.set()
                assert may_go.wait(60)

        return on_layer

    with running_gang(shared_checkpoints("llama"), 2, on_step=hold, max_batch_tokens=64) as gang:
        engine = gang.assembled.engine
        assert gang.assembled.model.spec.num_layers == last_layer + 1
        engine.scheduler.add(make_request("long", prompts_of([100])[0], max_tokens=1))
        stepping = threading.Thread(target=engine.step)
        stepping.start()
        assert is_held.wait(60)
        stepping.join(0.3)
        assert stepping.is_alive(), "rank 0 is done while another rank writes KV"
        may_go.set()
        stepping.join(60)
        assert not stepping.is_alive()


@pytest.mark.parametrize(
    ("changes", "num_ranks", "message"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 3, "3: does not divide the model's 8 attention heads"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            2,
            "2: does not divide the model's 3 KV heads, nor is it a multiple",
        ),
        ({"intermediate_size": 150, "num_attention_heads": 8}, 4, "does not divide the model's intermediate_size 150"),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_refused_before_anything_is_loaded(
    tmp_path: Path, changes: dict[str, int], num_ranks: int, message: str
) -> None:
    # B081, B082
    make_config("llama", **changes).save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        plan_memory(read_spec(tmp_path), EngineConfig(tensor_parallel=num_ranks), None)


def test_a_vocabulary_that_ranks_cannot_share_evenly_is_shared_unevenly(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", "llama", is_shared=True, vocab_size=509)
    requests = [make_request("a", prompts_of([20], 509)[0]), make_request("b", [508, 0, 127, 254], temperature=0.7)]
    with running_gang(folder, 4) as gang:
        assert run(gang.assembled.engine, requests) == run(make_engine(folder).engine, requests)


def test_memory_is_planned_for_each_rank(shared_checkpoints: Callable[[str], Path]) -> None:
    spec = read_spec(shared_checkpoints("qwen2"))
    plans = {
        ranks: plan_memory(spec, EngineConfig(tensor_parallel=ranks, kv_memory_gib=0.01), None) for ranks in (1, 2, 4)
    }
    assert plans[2].weights_bytes == plans[1].weights_bytes // 2
    assert max(plans[2].num_blocks) == pytest.approx(2 * max(plans[1].num_blocks), abs=1)
    # Two KV heads: four ranks hold each twice.
    assert plans[4].num_blocks == plans[2].num_blocks
    assert plans[4].total_bytes == 4 * plans[4].rank_bytes
    assert "4 ranks" in str(plans[4])
