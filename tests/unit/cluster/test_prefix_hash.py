"""Names of prefixes: what they depend on, and that every process computes the same."""

import os
import subprocess
import sys

import numpy as np

from pdserve.cluster.base.prefix_hash import PrefixHash, PrefixIdentity, extend_chain

IDENTITY = PrefixIdentity(model_digest="m", kv_dtype="float32", numerics_digest="n")
TOKENS = np.arange(100, 180, dtype=np.int32)


def chain_of(root: PrefixHash, num_tokens: int = 80, block_size: int = 16) -> list[PrefixHash]:
    chain: list[PrefixHash] = []
    extend_chain(chain, root, TOKENS, num_tokens, block_size)
    return chain


def test_only_whole_blocks_have_names() -> None:
    # known_faults B034
    root = IDENTITY.root()
    assert [len(chain_of(root, count)) for count in (0, 15, 16, 17, 47, 48)] == [0, 0, 1, 1, 2, 3]


def test_a_chain_grows_as_if_it_were_made_at_once() -> None:
    root = IDENTITY.root()
    chain: list[PrefixHash] = []
    for count in range(81):
        extend_chain(chain, root, TOKENS, count, 16)
    assert chain == chain_of(root)


def test_block_sizes_agree_at_common_ends() -> None:
    root = IDENTITY.root()
    assert chain_of(root, block_size=32) == chain_of(root)[1::2]


def test_everything_that_kv_depends_on_changes_every_name() -> None:
    others = [
        PrefixIdentity(model_digest="x", kv_dtype="float32", numerics_digest="n").root(),
        PrefixIdentity(model_digest="m", kv_dtype="int8", numerics_digest="n").root(),
        PrefixIdentity(model_digest="m", kv_dtype="float32", numerics_digest="x").root(),
        IDENTITY.root(adapter="a"),
        IDENTITY.root(salt="a"),
        # Parts are told apart by their lengths.
        PrefixIdentity(model_digest="mf", kv_dtype="loat32", numerics_digest="n").root(),
        IDENTITY.root(),
    ]
    names = [name for root in others for name in chain_of(root)]
    assert len(set(names)) == len(names)


def test_a_changed_token_changes_its_block_and_all_that_follow() -> None:
    changed = TOKENS.copy()
    changed[20] += 1
    chain: list[PrefixHash] = []
    extend_chain(chain, IDENTITY.root(), changed, 80, 16)
    assert [mine == theirs for mine, theirs in zip(chain, chain_of(IDENTITY.root()), strict=True)] == [True] + [
        False
    ] * 4


def test_every_process_computes_the_same_names() -> None:
    # known_faults B036
    code = (
        "import numpy as np; from pdserve.cluster.base.prefix_hash import *; chain = []; "
        "extend_chain(chain, PrefixIdentity(model_digest='m', kv_dtype='float32', numerics_digest='n').root(), "
        "np.arange(100, 180, dtype=np.int32), 80, 16); print(chain[-1].hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2", "random")
    }
    assert found == {chain_of(IDENTITY.root())[-1].hex()}
