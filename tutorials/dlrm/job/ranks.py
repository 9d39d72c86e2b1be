"""The job on many processes (--torchrec): how they start, and the pass of each.

torchrun's elastic launcher starts them, called by this program on one machine, or by torchrun on
one or several.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from argparse import Namespace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from tutorials.dlrm.data import Batch, CriteoReader
from tutorials.dlrm.job import workflow
from tutorials.dlrm.job.files import check_paths
from tutorials.dlrm.job.optimizers import row_optimizer
from tutorials.dlrm.job.policies import table_policies
from tutorials.dlrm.loop import HALF_LIFE, Pass, tensors
from tutorials.dlrm.metrics import RunningAUC, exact_auc
from tutorials.ranks import run_on_ranks, silence, started_by_torchrun

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# Errors that a user can do something about: no traceback.
_EXPECTED = ("CheckpointError", "DataError", "FileNotFoundError", "ValueError")
_TAKEN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run(opts: Namespace) -> dict[str, Any] | None:
    """Train on many processes.

    Returns:
        The result that the program prints at its end, in the process that is to print it: the one
        that was called, or, with torchrun, rank 0. None in the others.

    Raises:
        ValueError: The options do not fit to this machine, or a rank refuses the data.
        FileNotFoundError: A file does not exist.
        KeyboardInterrupt: Ctrl-C has ended the processes.
    """
    _check(opts)
    if started_by_torchrun():
        return work(opts)
    # here, since it takes half a second and the job of one process does without
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # the launcher takes the handlers of these, and keeps them
    handlers = {signum: signal.getsignal(signum) for signum in _TAKEN_SIGNALS}
    # What the import starts may ask the driver for GPUs, and forks cannot use one then.
    forked_from = "tutorials.dlrm.job.rank_imports" if opts.device == "cpu" else None
    try:
        result: dict[str, Any] = run_on_ranks(_nproc(opts), work, opts, forked_from=forked_from)
    except ChildFailedError as failed:
        _reraise(failed)
    except SignalException as signalled:
        if signalled.sigval == signal.SIGINT:  # the processes have ended by now
            raise KeyboardInterrupt from None
        raise
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    return result


def work(opts: Namespace) -> dict[str, Any] | None:
    """Join the other ranks and train; return the result on rank 0."""
    silence()
    torch.set_num_threads(max(1, opts.threads // int(os.environ["LOCAL_WORLD_SIZE"])))
    device = torch.device(opts.device)
    if opts.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    try:
        backend = "nccl" if opts.device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=opts.timeout))
        try:
            return train(opts, device)
        finally:
            dist.destroy_process_group()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher sends one, too
        raise


def train(opts: Namespace, device: torch.device) -> dict[str, Any] | None:
    """Train, evaluate and report together with the other ranks of the process group.

    Args:
        opts: Of the job, the same on all ranks.
        device: Of this rank.

    Returns:
        The result that the program prints at its end; None on ranks other than 0.
    """
    from tutorials.dlrm.job.sharded_model import ShardedModel  # TorchRec, which takes seconds

    rank, world_size = dist.get_rank(), dist.get_world_size()
    _check_machines(world_size)
    # Ranks of a machine that find no samples wait for one of them to make some.
    data = workflow.open_data(opts, quiet=rank > 0)
    model = ShardedModel(opts, table_policies(opts, data.paths, data.train_lines), device)
    if rank == 0:
        print(model.describe_plan(), file=sys.stderr)
    progress = RankPass(
        model.parallel,
        [model.optimizer],
        device=device,
        log_every=opts.log_every,
        figures=model.figures,
    )
    trained = workflow.train(
        opts, data, progress, [model.dense_optimizer], rank=rank, world_size=world_size
    )
    if rank > 0:
        return None
    curves = {"dynamic tables": (progress.points, trained.auc)}
    more = {"world_size": world_size, "sharding": model.sharding_types()}
    return workflow.report(opts, data, progress, trained.figures, curves, more)


class RankPass(Pass):
    """The pass of a rank over its part of every batch; with the others, that of one process."""

    def evaluate(self, reader: CriteoReader, bar: tqdm[Any] | None = None) -> float:
        """Return the AUC on every sample of all ranks' readers; NaN on ranks other than 0."""
        mine = self._predict(reader, bar)
        first = dist.get_rank() == 0
        everyones: list[Any] | None = [None] * dist.get_world_size() if first else None
        dist.gather_object(mine, everyones)
        if everyones is None:
            return float("nan")
        labels, scores = zip(*everyones, strict=True)
        return exact_auc(torch.cat(labels).numpy(), torch.cat(scores).numpy())

    def _train_batch(self, batch: Batch, following: Batch | None) -> None:
        """Train on this rank's part of a batch, which is empty if the batch has too few samples."""
        dense, ids, labels = tensors(batch, self.device)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        logits = self.model(dense, ids)
        loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        # Ranks' gradients are averaged, so this makes them those of the whole batch's mean loss.
        (loss * (dist.get_world_size() / batch.whole)).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self._loss_sum += loss.detach().double().cpu()
        self.auc.update(labels.cpu(), logits.detach().sigmoid().cpu(), passed=batch.whole)
        self._count(batch.whole)

    def state_dict(self) -> dict[str, Any]:
        """Return the figures of all ranks, which must call this together."""
        loss_sum, counts = self._sums()
        return super().state_dict() | {"auc": counts, "loss_sum": loss_sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over figures of all ranks: rank 0 goes on with them, the others begin with zeros."""
        super().load_state_dict(state)
        if dist.get_rank() > 0:
            self.auc.counts = torch.zeros_like(self.auc.counts)
            self._loss_sum = torch.zeros_like(self._loss_sum)

    def _loss_and_auc(self) -> tuple[float, float]:
        loss_sum, counts = self._sums()
        everyones = RunningAUC(HALF_LIFE)
        everyones.counts = counts
        return float(loss_sum) / self._loss_samples, everyones.compute()

    def _sums(self) -> tuple[Tensor, Tensor]:
        """Add up over ranks the losses since the last point and the counts of the running AUC."""
        sums = torch.cat([self._loss_sum.reshape(1), self.auc.counts.flatten()]).to(self.device)
        dist.all_reduce(sums)
        sums = sums.cpu()
        return sums[0], sums[1:].view_as(self.auc.counts)


def check_alone() -> None:
    """Raise ValueError if torchrun has started processes that would train a model each."""
    if started_by_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
        raise ValueError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes, each of which would train "
            "a model of its own: add --torchrec"
        )


def _check_machines(world_size: int) -> None:
    """Raise ValueError on all ranks if machines have different numbers of them."""
    sizes = [0] * world_size
    dist.all_gather_object(sizes, int(os.environ["LOCAL_WORLD_SIZE"]))
    if len(set(sizes)) > 1:
        raise ValueError(
            f"torchrun has started {min(sizes)} ranks on a machine and {max(sizes)} on another: "
            "TorchRec needs as many on each: give all of them the same --nproc-per-node"
        )


def _nproc(opts: Namespace) -> int:
    nproc: int = opts.nproc or (torch.cuda.device_count() if opts.device == "cuda" else 1)
    return nproc


def _check(opts: Namespace) -> None:
    if importlib.util.find_spec("torchrec") is None:
        raise ValueError(
            "--torchrec: TorchRec is not installed; use make train ARGS=--torchrec, which installs "
            "it, or see pyproject.toml"
        )
    row_optimizer(opts)  # raises if the optimizer is unknown
    if opts.data:
        check_paths(opts.data)
    local_size = _nproc(opts)
    if started_by_torchrun():
        if opts.nproc is not None:
            raise ValueError(
                f"--nproc {opts.nproc}: torchrun has started the processes: leave --nproc out, or "
                "give torchrun --nproc-per-node"
            )
        local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        if restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            raise ValueError(
                f"torchrun --max-restarts {restarts}: ranks that start again would read addresses "
                "of those before: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
            )
    if opts.device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no CUDA device; use --device cpu")
        if local_size > torch.cuda.device_count():
            raise ValueError(
                f"--device cuda: {local_size} processes want a GPU each, but this machine has "
                f"{torch.cuda.device_count()}: start fewer processes"
            )


def _reraise(failed: ChildFailedError) -> NoReturn:
    """Raise the error of the first rank to fail, if that is for the user."""
    _, failure = failed.get_first_failure()
    if isinstance(failure.message, dict):
        kind, _, message = failure.message["message"].partition(": ")
        if kind in _EXPECTED:
            raise ValueError(message) from None
    raise failed
