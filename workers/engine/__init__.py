"""The engine core: sequences, blocks, scheduler, plan, sampler and the step that joins them."""
