"""Training that goes on from the last commit of a log."""

from __future__ import annotations

from os import PathLike

import torch.distributed as dist
from torch import nn

from torch_dynemb.argument_checks import described
from torch_dynemb.checkpoint.loading.load import LoadReport
from torch_dynemb.delta_log.folding import load_commits
from torch_dynemb.delta_log.follower import Log, base_of
from torch_dynemb.delta_log.log import DeltaLog
from torch_dynemb.delta_log.reader import sinks_of
from torch_dynemb.distributed.together import ranks_of
from torch_dynemb.parts.table_parts import parts_of
from torch_dynemb.process.torch_modes import plain_torch


@plain_torch()
def resume(
    log: DeltaLog | Log,
    model: nn.Module,
    *,
    base: str | PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
) -> LoadReport:
    """Replace the content of a model by that of the last commit of a log.

    The log must have been published with ``DeltaLog(resume=True)``. The base and all whole commits
    are loaded together: ids, rows, optimizer state, scores, counts of admission, clocks, seeds and
    the dense state are those of the trainer at that commit. Places of ids and rows are new, as with
    a load that is not exact. All ranks call it; their number, sharding, devices and capacities may
    differ from those of the trainer.

    Args:
        log: a :class:`DeltaLog` without a model: the model is also attached to it, and the next
            commit follows the last one. An empty one in a directory begins with the content of
            the model. Or a directory, a sink, or the sinks of all ranks: they are only read.
        model: model with the tables, optimizers and policies of the trainer.
        base: path of the base; default: the newest one in the directory of the log.
        process_group: ranks that load together; default: all. Those of a :class:`DeltaLog` are
            given to it.
        progress: show a progress bar; default: if the standard error is a terminal.

    Returns:
        Result of the load. Its ``state`` is what the trainer gave with the last commit, or with the
        base if nothing was published since. Of an empty log it is None, and no table is loaded.

    Raises:
        TypeError: ``log`` is not a log, or ``model`` is not a module.
        ValueError: the model differs from the one that was published; the log was published
            without ``resume=True``; or a wrong argument.
        FileNotFoundError: the base is missing.
        NewBaseNeededError: commits between the base and the last one are missing.
        DamagedFileError: a commit or the base is damaged.
        NoRoomError: a table has too little room or memory.
        InUseError: the :class:`DeltaLog` has another writer, or a save runs in the background.
        RuntimeError: gradients are pending, or the :class:`DeltaLog` has a model already. In all
            cases all ranks raise, and the model is unchanged, with the exception of
            :func:`torch_dynemb.checkpoint.load`.

    Example:
        >>> import tempfile, torch, torch_dynemb as td
        >>> folder = tempfile.TemporaryDirectory()
        >>> def start():
        ...     bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.Adam(lr=0.1))
        ...     log = td.delta_log.DeltaLog(folder.name + "/log", resume=True)
        ...     return bag, log, td.delta_log.resume(log, bag)
        >>> bag, log, report = start()
        >>> print(report.state)
        None
        >>> bag(torch.tensor([[1, 2], [3, 1]])).sum().backward()
        >>> bag.optimizer.step()
        >>> log.publish(state={"samples": 2})
        1
        >>> log.close()  # or the process is killed
        >>> bag, log, report = start()
        >>> print(report.state, bag.group.size(0), log.sequence)
        {'samples': 2} 3 1
        >>> log.close()
        >>> folder.cleanup()
    """
    if isinstance(log, DeltaLog):
        if process_group is not None:
            raise ValueError(
                "delta_log.resume: process_group is given with a DeltaLog, which has its own: "
                "give DeltaLog(process_group=)"
            )
        return log._resume(model, base, progress)
    ranks = ranks_of(process_group)

    def prepare() -> str:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"delta_log.resume: model is {described(model)}, expected a torch.nn.Module"
            )
        sinks_of(log)
        return str(base_of("resume", log, base))

    path = ranks.run(prepare)
    return load_commits(ranks, path, sinks_of(log), model, parts_of(model), progress)


__all__ = ["resume"]
