"""What a rank knows of the transfers it ships, whatever the order in which steps and drops reach it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdserve.cluster.base.transfer_messages import TransferId
from pdserve.workers.engine.rank_step import ExportedStep
from pdserve.workers.handoff.exports import RankExporter
from support.chunks import make_transfer_id

TRANSFER = make_transfer_id(1)
STEPS = [(0, 512), (512, 1024), (1024, 1500)]


def make_exporter(released: list[int]) -> RankExporter:
    """An exporter of a layout of one layer, whose pair has no stream."""
    copier = SimpleNamespace(layout=SimpleNamespace(num_layers=1), mark=lambda: None)

    def note(transfer: TransferId, end_token: int) -> None:
        assert transfer == TRANSFER
        released.append(end_token)

    return RankExporter(cast(Any, copier), lambda pair_no: {}, note)


def compute(exporter: RankExporter, send_from: int, end_token: int) -> None:
    step = ExportedStep(
        pair_no=1,
        transfer=TRANSFER,
        num_tokens=1500,
        num_sink_tokens=0,
        send_from=send_from,
        end_token=end_token,
        first_chunks=(),
        blocks=(),
    )
    assert exporter.begin_step([step])
    exporter.layer_done(0)


@pytest.mark.parametrize(("num_named", "place"), [(named, place) for named in (1, 2, 3) for place in range(named + 1)])
def test_a_drop_is_the_end_of_a_transfer_wherever_it_comes_between_its_steps(num_named: int, place: int) -> None:
    # I16. The drop says which step was the last; it may come before that one, and before the first.
    released: list[int] = []
    exporter = make_exporter(released)
    named = STEPS[:num_named]
    for step in named[:place]:
        compute(exporter, *step)
    exporter.drop(TRANSFER, named[-1][1])
    assert len(exporter) == (place < num_named)
    for step in named[place:]:
        compute(exporter, *step)
    assert released == [end for _, end in named], "pins of a step are released, shipped or not"
    assert len(exporter) == 0
