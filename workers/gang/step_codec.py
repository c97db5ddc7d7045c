"""Steps to bytes and back: msgpack, with arrays as their bytes; never pickle, though the reader is of one worker."""

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.ids import Incarnation, RequestId
from pdserve.cluster.base.transfer_messages import TransferId
from pdserve.workers.engine.plan import ForwardPlan, Int32
from pdserve.workers.engine.rank_step import BlockCopy, CopyKind, ExportedStep, RankStep


def encode_step(step: RankStep) -> bytes:
    """Return the bytes of a step."""
    plan = step.forward
    arrays = [] if plan is None else [plan.token_ids, plan.positions, plan.row_starts, *plan.block_tables]
    body: bytes = msgpack.packb(
        [
            [[int(copy.kind), copy.group, copy.source, copy.target] for copy in step.copies],
            [_bytes(array) for array in arrays],
            _bytes(step.logits_indices),
            step.num_sampled,
            step.is_whole.tobytes(),
            step.wants_logits,
            [_exported_fields(exported) for exported in step.exported],
        ]
    )
    return body


def decode_step(body: bytes) -> RankStep:
    """Return the step of encode_step's bytes. Raises ProtocolError for anything else."""
    try:
        copies, plan, logits_indices, num_sampled, is_whole, wants_logits, exported = msgpack.unpackb(body)
        return RankStep(
            copies=tuple(
                BlockCopy(kind=CopyKind(kind), group=group, source=source, target=target)
                for kind, group, source, target in copies
            ),
            forward=_forward(plan) if plan else None,
            logits_indices=_array(logits_indices),
            num_sampled=num_sampled,
            is_whole=np.frombuffer(is_whole, np.bool_),
            wants_logits=wants_logits,
            exported=tuple(_exported(fields) for fields in exported),
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a step: {error}") from error


def _bytes(array: Int32) -> bytes:
    return array.astype(np.int32, copy=False).tobytes()


def _array(part: bytes) -> Int32:
    # Copied: what is read from a buffer is read-only, which numba takes for another type.
    array: NDArray[np.int32] = np.frombuffer(part, np.int32).copy()
    return array


def _forward(parts: Sequence[bytes]) -> ForwardPlan:
    token_ids, positions, row_starts, *tables = (_array(part) for part in parts)
    return ForwardPlan(
        token_ids=token_ids,
        positions=positions,
        row_starts=row_starts,
        block_tables=tuple(table.reshape(len(row_starts) - 1, -1) for table in tables),
    )


def _exported_fields(step: ExportedStep) -> list[Any]:
    transfer = step.transfer
    return [
        step.pair_no,
        [transfer.request_id, transfer.attempt, transfer.transfer_no, transfer.source, transfer.sink],
        step.num_tokens,
        step.num_sink_tokens,
        step.send_from,
        step.end_token,
        list(step.first_chunks),
        [_bytes(blocks) for blocks in step.blocks],
    ]


def _exported(fields: Sequence[Any]) -> ExportedStep:
    pair_no, transfer, num_tokens, num_sink_tokens, send_from, end_token, first_chunks, blocks = fields
    request_id, attempt, transfer_no, source, sink = transfer
    return ExportedStep(
        pair_no=pair_no,
        transfer=TransferId(
            request_id=RequestId(request_id),
            attempt=attempt,
            transfer_no=transfer_no,
            source=Incarnation(source),
            sink=Incarnation(sink),
        ),
        num_tokens=num_tokens,
        num_sink_tokens=num_sink_tokens,
        send_from=send_from,
        end_token=end_token,
        first_chunks=tuple(first_chunks),
        blocks=tuple(_array(table) for table in blocks),
    )
