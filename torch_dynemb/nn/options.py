"""Options of modules."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.distributed as dist
from typing_extensions import TypedDict

from torch_dynemb.initializers import Initializer
from torch_dynemb.keyword_options import FieldOf
from torch_dynemb.optim import OptimizerConfig
from torch_dynemb.policy.policy import Policy
from torch_dynemb.storage.tiers import Storage
from torch_dynemb.table.config import EvalDefault, TableConfig
from torch_dynemb.table.options import GroupOptions


class ModuleOptions(GroupOptions, total=False):
    """Options of each module, whether it has one table or several.

    Attributes:
        optimizer: config of the rows' optimizer, such as ``Adam(lr=1e-3)``; tables of a collection
            get a param group each. Default: none, which is a ValueError where ``trainable`` is
            True.
        trainable: bool; False: insert nothing, train nothing. Default: True.
        output_dtype: of what a lookup returns: float32, the default, bfloat16 or float16. Sums are
            float32.
        process_group: the ranks that share the rows: each has the rows of some ids, and a lookup
            exchanges ids and rows. All ranks construct the module alike, call forward and backward
            together, and may wrap it in DDP or FSDP2. Gradients are averaged over the ranks, and a
            capacity is divided by them. An SSDStore of several ranks writes into
            ``<path>/<tables>/rank<r>of<n>``. ``len()``, ``ids()``, ``group`` and ``state_dict()``
            are about this rank's rows. Default: the rows are of this process alone. Training raises
            ReplicatedTableError unless all ranks of the default group share the rows, or
            :func:`torch_dynemb.private_to_rank` has been called.
    """

    optimizer: Annotated[OptimizerConfig | None, None]
    trainable: Annotated[bool, True]
    output_dtype: Annotated[torch.dtype, torch.float32]
    process_group: Annotated[dist.ProcessGroup | None, None]


class RowOptions(TypedDict, total=False):
    """Options of the rows of a module that has one table.

    Attributes:
        name: names the table in state dicts and seeds its initial values, together with
            ``torch.initial_seed()``. Default: state dicts call it ``"embedding"``, and the seed of
            its initial values is drawn from torch's generator, as nn.Embedding draws its weight.
        initializer, padding_idx, eval_default, policy, dtype, storage: as in
            :class:`torch_dynemb.TableConfig`.
    """

    name: Annotated[str | None, None]
    initializer: Annotated[Initializer | None, FieldOf(TableConfig)]
    padding_idx: Annotated[int | None, FieldOf(TableConfig)]
    eval_default: Annotated[EvalDefault, FieldOf(TableConfig)]
    policy: Annotated[Policy | None, FieldOf(TableConfig)]
    dtype: Annotated[torch.dtype, FieldOf(TableConfig)]
    storage: Annotated[Storage | None, FieldOf(TableConfig)]


class SingleTableOptions(RowOptions, ModuleOptions, total=False):
    """Options of a module that has one table: those of its rows, and those of each module.

    The constructor of :class:`torch_dynemb.DynamicEmbedding` shows the text of each.
    """


__all__ = ["ModuleOptions", "RowOptions", "SingleTableOptions"]
