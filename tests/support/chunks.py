"""Chunk headers, streams and ranges for tests of the hand-off's parts."""

from pdserve.cluster.base.ids import Incarnation, RequestId
from pdserve.cluster.base.kv_layout import ChunkRange, KVLayout
from pdserve.cluster.base.transfer_messages import Cargo, Chunk, TransferId
from pdserve.kvtransfer.layout import Stream, plan_streams

RANGE = ChunkRange(group=0, first_layer=0, end_layer=1, first_head=0, end_head=1, first_token=0, end_token=1)


def make_transfer_id(number: int) -> TransferId:
    """Return a transfer id."""
    return TransferId(
        request_id=RequestId("r"), attempt=0, transfer_no=number, source=Incarnation("p"), sink=Incarnation("d")
    )


def make_header(
    seq: int,
    slot: int = 0,
    *,
    link_no: int = 1,
    num_bytes: int = 8,
    transfer: int | None = None,
    chunk_no: int = 0,
    checksum: int = 3,
) -> Chunk:
    """Return a chunk header; the link's test pattern without a transfer."""
    cargo = None
    if transfer is not None:
        cargo = Cargo(transfer=make_transfer_id(transfer), chunk_no=chunk_no, range=RANGE, checksum=checksum)
    return Chunk(
        link_no=link_no,
        stream_no=0,
        seq=seq,
        slot=slot,
        num_bytes=num_bytes,
        cargo=cargo,
        num_resends=0,
        is_void=False,
    )


def whole_stream(layout: KVLayout) -> Stream:
    """Return the stream of a pair of one rank each, with equal layouts."""
    (stream,) = plan_streams(layout, layout)
    return stream
