"""Steps on their way to other ranks come out as they went in; what is no step is refused."""

from dataclasses import fields, is_dataclass

import msgpack
import numpy as np
import pytest

from pdserve.cluster.base.errors import ProtocolError
from pdserve.workers.engine.plan import ForwardPlan
from pdserve.workers.engine.rank_step import BlockCopy, CopyKind, ExportedStep, RankStep
from pdserve.workers.gang.step_codec import decode_step, encode_step
from support.chunks import make_transfer_id


def make_step(*, num_rows: int = 2, has_exports: bool = True) -> RankStep:
    blocks = (np.array([4, 5], np.int32), np.array([-1, 7], np.int32))
    return RankStep(
        copies=tuple(BlockCopy(kind=kind, group=1, source=3, target=9) for kind in CopyKind),
        forward=ForwardPlan(
            token_ids=np.arange(5, dtype=np.int32),
            positions=np.arange(10, 15, dtype=np.int32),
            row_starts=np.linspace(0, 5, num_rows + 1).astype(np.int32),
            # A slice, as row tables are.
            block_tables=tuple(np.arange(40, dtype=np.int32).reshape(4, 10)[:num_rows, :3] for _ in range(2)),
        ),
        logits_indices=np.array([2, 4], np.int32),
        num_sampled=2,
        is_whole=np.array([True, False]),
        wants_logits=False,
        exported=(
            ExportedStep(
                pair_no=3,
                transfer=make_transfer_id(8),
                num_tokens=40,
                num_sink_tokens=16,
                send_from=16,
                end_token=30,
                first_chunks=(0, 5),
                blocks=blocks,
            ),
        )
        if has_exports
        else (),
    )


def assert_equal(found: object, expected: object) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, tuple):
        assert isinstance(found, tuple)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif is_dataclass(expected):
        for field in fields(expected):
            assert_equal(getattr(found, field.name), getattr(expected, field.name))
    else:
        assert found == expected


@pytest.mark.parametrize("has_exports", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_a_step_comes_out_as_it_went_in(num_rows: int, has_exports: bool) -> None:
    step = make_step(num_rows=num_rows, has_exports=has_exports)
    found = decode_step(encode_step(step))
    assert_equal(found, step)
    # Kernels are compiled for arrays that may be written.
    assert found.forward.token_ids.flags.writeable


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgpack.packb([1, 2]), msgpack.packb(None), encode_step(make_step())[:-9]]
)
def test_what_is_no_step_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_step(body)
