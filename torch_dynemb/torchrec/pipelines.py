"""TorchRec's pipeline that prefetches rows, also on devices without streams."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist
from torchrec.distributed.train_pipeline.pipeline_context import PrefetchTrainPipelineContext


class PrefetchTrainPipeline(PrefetchTrainPipelineSparseDist):  # type: ignore[misc]
    """TorchRec's PrefetchTrainPipelineSparseDist, also for CPUs.

    While one batch is trained, two things happen for the next:

    * its ids have been sent to the ranks that own them;
    * rows of tables with ``storage`` are loaded into memory.

    TorchRec's own class needs a device with streams and raises on a CPU.

    Args:
        model: made by DistributedModelParallel.
        optimizer: of the model.
        device: of the model.
        more: as in TorchRec.

    Example:
        >>> from torch_dynemb.torchrec import PrefetchTrainPipeline
        >>> def train(model, optimizer, batches):
        ...     pipeline = PrefetchTrainPipeline(model, optimizer, torch.device("cpu"))
        ...     batches = iter(batches)
        ...     try:
        ...         while True:
        ...             output = pipeline.progress(batches)
        ...     except StopIteration:
        ...         return
    """

    def _prefetch(self, following: Any) -> None:
        if self._data_dist_stream is not None:
            super()._prefetch(following)
            return
        if following is None:
            return
        # receives the context of the next batch; up to TorchRec 1.6 it receives the batch, and
        # there is one place for its context
        own = isinstance(following, PrefetchTrainPipelineContext)
        context = following if own else self._context
        for module in self._pipelined_modules:
            name = module.forward._name
            ids = context.input_dist_tensors_requests.pop(name).wait()
            of_module = context.module_contexts.pop(name)
            module.prefetch(ctx=of_module, dist_input=ids)
            context.module_input_post_prefetch[name] = ids
            context.module_contexts_post_prefetch[name] = of_module


__all__ = ["PrefetchTrainPipeline"]
