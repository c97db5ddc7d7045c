"""Paged attention by FlashInfer, where it is installed: the first choice on CUDA. Our blocks are its pages (HND).

Its plan is made once per step and KV group, on the host, and shared by the layers. KV in bf16, fp16 or fp8. Not run on
a GPU yet: the self-test at load decides whether it is used (choice.py).
"""

from typing import Any

import numpy as np
import torch

from pdserve.workers.attention.protocol import AttentionParameters, StepMetadata
from pdserve.workers.engine.plan import Int32

WORKSPACE_BYTES = 128 << 20


def page_lists(step: StepMetadata, group: int, block_size: int) -> tuple[Int32, Int32, Int32]:
    """Return where each row's pages begin [R + 1], the pages, and how many tokens the last one of each row holds [R].

    Pages that no query of a row sees, behind a window, are left out: positions count from the end.
    """
    place = step.groups[group]
    ends = step.positions[step.row_starts[1:] - 1] + 1
    firsts = step.positions[step.row_starts[:-1]]
    first_pages = np.maximum(firsts - place.window + 1, 0) // block_size if place.window else np.zeros_like(firsts)
    end_pages = -(-ends // block_size)
    pages = [table[first:end] for table, first, end in zip(place.block_table, first_pages, end_pages, strict=True)]
    indptr = np.concatenate([[0], np.cumsum(end_pages - first_pages)]).astype(np.int32)
    last = (ends - (end_pages - 1) * block_size).astype(np.int32)
    return indptr, np.concatenate(pages).astype(np.int32), last


class FlashInferAttention:
    """The backend. It knows no sinks."""

    def __init__(self, device: torch.device) -> None:
        """Raises ImportError where the library is not installed."""
        import flashinfer  # type: ignore[import-not-found]  # an extra

        self._make_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._planned: tuple[StepMetadata, dict[tuple[int, float, float], Any]] | None = None

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, step: StepMetadata, parameters: AttentionParameters
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        if parameters.sinks is not None:
            raise NotImplementedError("no sinks with FlashInfer")
        compute_dtype = kv.dtype if kv.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
        wrapper = self._wrapper(query, kv, step, parameters, compute_dtype)
        out: torch.Tensor = wrapper.run(query.to(compute_dtype), kv)
        return out.reshape(query.shape[0], -1).to(query.dtype)

    def _wrapper(
        self,
        query: torch.Tensor,
        kv: torch.Tensor,
        step: StepMetadata,
        parameters: AttentionParameters,
        compute_dtype: torch.dtype,
    ) -> Any:
        """Return the plan of this step for layers that attend alike."""
        if self._planned is None or self._planned[0] is not step:
            self._planned = (step, {})
        key = parameters.group, parameters.scale, parameters.softcap
        wrappers = self._planned[1]
        if key not in wrappers:
            indptr, pages, last = page_lists(step, parameters.group, kv.shape[3])
            window = step.groups[parameters.group].window
            # Each plan has a part of the workspace to itself only while it runs: layers run one after the other.
            wrapper = self._make_wrapper(self._workspace, "HND")
            wrapper.plan(
                step.tensors(query.device).row_starts,
                torch.from_numpy(indptr).to(query.device),
                torch.from_numpy(pages).to(query.device),
                torch.from_numpy(last).to(query.device),
                query.shape[1],
                kv.shape[2],
                query.shape[2],
                kv.shape[3],
                causal=True,
                sm_scale=parameters.scale,
                window_left=window - 1 if window else -1,
                logits_soft_cap=parameters.softcap or None,
                q_data_type=compute_dtype,
                kv_data_type=kv.dtype,
            )
            wrappers[key] = wrapper
        return wrappers[key]
