"""Tensor-parallel ranks as processes: how a step reaches them, and what several ranks are worth.

    python -m pdserve.benchmarks.gang [--ranks 2 4] [--repeats 3] [--hidden 1024] [--layers 8]

1. *steps*: microseconds from rank 0's call until the last of the other ranks holds the decoded step, over the step link
   (one frame a rank on a connection of its own) and as a broadcast of the process group (length, then bytes), of a
   decode step and of a prefill step. Interleaved (A B A B …).
2. *tokens*: output tokens a second of a random Llama (fp16 weights) on one rank with one thread, one rank with two, and
   two ranks with one thread each, at N = 1, 8, 32; and prompt tokens a second. Interleaved.

Two ranks need two cores; with more ranks than cores part 1 measures the scheduler too.
"""

import argparse
import contextlib
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pdserve.benchmarks.environment import describe_environment
from pdserve.benchmarks.gpu_models import generate
from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.engine_config import EngineConfig
from pdserve.kvtransfer.transports.torch_store import TorchStore, open_store
from pdserve.workers.assembly import AssembledEngine, assemble_engine, load_rank, make_follower
from pdserve.workers.engine.plan import ForwardPlan
from pdserve.workers.engine.rank_step import RankStep
from pdserve.workers.gang.process_ranks import ProcessRank
from pdserve.workers.gang.step_codec import decode_step, encode_step
from pdserve.workers.gang.step_link import StepReceiver, StepSender

HOST, KEY = "127.0.0.1", "benchmark"
MEET_S = 60.0
ROUNDS, STEPS = 7, 200
"""Of each way of sending a step."""
NEW_TOKENS, PROMPT_TOKENS = 32, 512
VOCABULARY = 8192


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one gang find each other."""

    num_ranks: int
    store_port: int
    steps_port: int


def join(meeting: Meeting, rank: int, store: Any) -> ProcessRank:
    """Return a rank's view of the group."""
    return ProcessRank(store, rank, meeting.num_ranks, key=KEY, host=HOST, device=torch.device("cpu"), meet_s=MEET_S)


def enter(meeting: Meeting, rank: int) -> tuple[ProcessRank, StepReceiver]:
    """Join as a rank other than 0."""
    connection = socket.create_connection((HOST, meeting.steps_port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(bytes([rank]))
    return join(meeting, rank, open_store(HOST, meeting.store_port)), StepReceiver(connection)


def take_steps(meeting: Meeting, rank: int, times: Connection) -> None:
    """A process: take steps both ways in turn and send when each was decoded."""
    torch.set_num_threads(1)
    group, steps = enter(meeting, rank)
    for _ in range(2 * ROUNDS):
        found = []
        for _ in range(STEPS):
            steps.receive()
            found.append(time.monotonic())
            group.all_reduce_min(0.0)
        times.send(found)
        found = []
        for _ in range(STEPS):
            length = torch.zeros(1, dtype=torch.int64)
            _broadcast(group, length)
            body = torch.empty(int(length), dtype=torch.uint8)
            _broadcast(group, body)
            decode_step(body.numpy().tobytes())
            found.append(time.monotonic())
            group.all_reduce_min(0.0)
        times.send(found)


def _broadcast(group: ProcessRank, tensor: torch.Tensor) -> None:
    options = torch.distributed.distributed_c10d.BroadcastOptions()
    options.rootRank = 0
    group._group.broadcast([tensor], options).wait()


def make_step(num_rows: int, tokens_each: int) -> RankStep:
    """Return a step of a model with one KV group, whose texts are about 1000 tokens long."""
    num_tokens = num_rows * tokens_each
    return RankStep(
        copies=(),
        forward=ForwardPlan(
            token_ids=np.arange(num_tokens, dtype=np.int32),
            positions=np.tile(np.arange(tokens_each, dtype=np.int32), num_rows),
            row_starts=np.arange(num_rows + 1, dtype=np.int32) * tokens_each,
            block_tables=(np.arange(num_rows * 64, dtype=np.int32).reshape(num_rows, 64),),
        ),
        logits_indices=np.arange(num_rows, dtype=np.int32),
        num_sampled=num_rows,
        is_whole=np.zeros(num_rows, np.bool_),
        wants_logits=False,
        exported=(),
    )


@contextlib.contextmanager
def running_ranks(
    num_ranks: int, run: Callable[..., None], *arguments: object
) -> Iterator[tuple[ProcessRank, StepSender, list[Connection]]]:
    """Start the other ranks as processes, each calling `run(meeting, rank, pipe, *arguments)`; yield rank 0's ends."""
    spawn = multiprocessing.get_context("spawn")
    store = TorchStore()
    held = store.get(HOST)
    with socket.create_server((HOST, 0)) as server:
        meeting = Meeting(num_ranks, store.port, server.getsockname()[1])
        pipes = [spawn.Pipe(duplex=False) for _ in range(1, num_ranks)]
        others = [
            spawn.Process(target=run, args=(meeting, rank, pipe[1], *arguments), daemon=True)
            for rank, pipe in enumerate(pipes, start=1)
        ]
        for process in others:
            process.start()
        connections: dict[int, socket.socket] = {}
        while len(connections) < len(others):
            connection, _ = server.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connections[connection.recv(1)[0]] = connection
    sender = StepSender(connections)
    try:
        yield join(meeting, 0, held), sender, [pipe[0] for pipe in pipes]
    finally:
        sender.close()
        for process in others:
            process.join()
        store.close()


def measure_steps(num_ranks: int) -> list[dict[str, Any]]:
    """Compare the two ways of sending a step."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with running_ranks(num_ranks, take_steps) as (group, sender, pipes):
        for name, step in (("decode, 32 rows", make_step(32, 1)), ("prefill, 512 tokens", make_step(1, 512))):
            found: dict[str, list[float]] = {"link": [], "broadcast": []}

            def broadcast(step: RankStep = step) -> None:
                body = torch.frombuffer(bytearray(encode_step(step)), dtype=torch.uint8)
                _broadcast(group, torch.tensor([len(body)]))
                _broadcast(group, body)

            def lead(step: RankStep = step) -> None:
                sender.broadcast(step)

            for _ in range(ROUNDS):
                for way, send in (("link", lead), ("broadcast", broadcast)):
                    starts = []
                    for _ in range(STEPS):
                        starts.append(time.monotonic())
                        send()
                        group.all_reduce_min(0.0)
                    ends = np.array([pipe.recv() for pipe in pipes]).max(axis=0)
                    found[way].append(1e6 * float(np.median(ends - np.array(starts))))
            row: dict[str, Any] = {"ranks": num_ranks, "step": name, "bytes": len(encode_step(step))}
            for way, values in found.items():
                row[f"{way}_us"] = round(statistics.median(values), 1)
                row[f"{way}_spread"] = [round(min(values), 1), round(max(values), 1)]
            row["ratio"] = round(row["broadcast_us"] / row["link_us"], 2)
            rows.append(row)
    return rows


def engine_config(num_ranks: int) -> EngineConfig:
    """Return the settings of all engines."""
    return EngineConfig(tensor_parallel=num_ranks, kv_memory_gib=0.5, prefix_cache=False, max_running=32)


def follow(meeting: Meeting, rank: int, pipe: Connection, folder: Path) -> None:
    """A process: be a rank of an engine until rank 0 closes."""
    group, steps = enter(meeting, rank)
    config = engine_config(meeting.num_ranks)
    loaded = load_rank(folder, config, max_model_len=1024, num_threads=1, group=group)
    runner = make_follower(loaded, config, num_threads=1)
    while (step := steps.receive()) is not None:
        runner.follow(step)


def measure_tokens(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Compare one rank with one thread, one with two, and two with one each."""

    def assemble(num_threads: int, **ranks: Any) -> AssembledEngine:
        config = engine_config(2 if ranks else 1)
        return assemble_engine(
            folder, config, max_model_len=1024, num_threads=num_threads, clock=SystemClock(), **ranks
        )

    with running_ranks(2, follow, folder) as (group, sender, _):
        engines = {
            "one rank, one thread": assemble(1),
            "one rank, two threads": assemble(2),
            "two ranks": assemble(1, group=group, followers=sender),
        }
        rng = np.random.default_rng(0)
        rows: list[dict[str, Any]] = []
        attempt = 0
        for what, batch, prompt, new in [
            ("prefill", 1, PROMPT_TOKENS, 1),
            *(("decode", batch, 1, NEW_TOKENS) for batch in (1, 8, 32)),
        ]:
            prompts = [rng.integers(10, VOCABULARY, prompt).tolist() for _ in range(batch)]
            rates: dict[str, list[float]] = {name: [] for name in engines}
            for _ in range(repeats + 1):
                for name, assembled in engines.items():
                    attempt += 1
                    # The thread counts are the thread's.
                    assembled.runner.bind_thread()
                    start = time.perf_counter()
                    generate(assembled, prompts, new, attempt)
                    rates[name].append(batch * max(prompt, new) / (time.perf_counter() - start))
            row: dict[str, Any] = {"what": what, "n": batch}
            for name, values in rates.items():
                # The first run warms up.
                row[name] = round(statistics.median(values[1:]), 1)
            row["ratio_to_one_thread"] = round(row["two ranks"] / row["one rank, one thread"], 2)
            row["ratio_to_two_threads"] = round(row["two ranks"] / row["one rank, two threads"], 2)
            rows.append(row)
    return rows


def save_model(folder: Path, hidden: int, layers: int) -> None:
    """Write a random Llama."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).half().save_pretrained(str(folder))


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows."""
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 256")
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    steps = [row for num_ranks in arguments.ranks for row in measure_steps(num_ranks)]
    show(steps)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), arguments.hidden, arguments.layers)
        tokens = measure_tokens(Path(folder), arguments.repeats)
    show(tokens)
    print(json.dumps({"benchmark": "gang", "steps": steps, "tokens": tokens, **describe_environment()}))


if __name__ == "__main__":
    main()
