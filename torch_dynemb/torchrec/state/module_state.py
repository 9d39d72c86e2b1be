"""state_dict and load_state_dict of a sharded collection's dynamic tables.

Both are collective: all ranks of the process group call them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ParameterSharding

from torch_dynemb.distributed.agreement import Option, check_agreement, comparable
from torch_dynemb.distributed.ranks import from_all_ranks
from torch_dynemb.distributed.together import ranks_of
from torch_dynemb.nn.distributed_checkpoint import also_take_sizes
from torch_dynemb.ops.columns import Clock
from torch_dynemb.policy.admission import AdmitFrequent
from torch_dynemb.policy.layout import score_words_of
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.rows.exchange import Place
from torch_dynemb.rows.into_part import loaders_of, publish_all, raise_first, replace_content
from torch_dynemb.table.clock import next_now
from torch_dynemb.table.config import TableConfig
from torch_dynemb.table.content import (
    optimizer_steps,
    read_content,
    read_counts,
)
from torch_dynemb.table.dense_state import leaves_tables_out
from torch_dynemb.torchrec.planning.options import NOT_TRAINED
from torch_dynemb.torchrec.planning.plans import ModulePlan
from torch_dynemb.torchrec.sharding.kernels import DynamicKernel
from torch_dynemb.torchrec.sharding.tables import row_dtype_of
from torch_dynemb.torchrec.state.entry_checks import check_entries, is_entry, missing_entries
from torch_dynemb.torchrec.state.load_planner import take_saved_sizes
from torch_dynemb.torchrec.state.shard_places import places_of
from torch_dynemb.torchrec.state.table_entry import TableEntry
from torch_dynemb.torchrec.state.table_load import TableLoad
from torch_dynemb.torchrec.state.table_state import (
    Layout,
    LocalTable,
    TableShape,
    save_table,
    state_key,
)


class ModuleState:
    """Dynamic tables of a sharded collection, with the entries of its state dict.

    Args:
        configs: TorchRec's, of the dynamic tables.
        plan: of the dynamic tables.
        shardings: by table name.
        kernels: on this rank.
        prefix: of their entries in the module's state dict, such as ``"embedding_bags."``.
        parameters: parameters without rows, which the module shows, by table name.
        process_group: of all shards.
        device: of the rows.

    Attributes:
        shapes: facts of the tables, by name.
        kernels, process_group, device: as given.
    """

    def __init__(
        self,
        configs: list[Any],
        plan: ModulePlan,
        shardings: Mapping[str, ParameterSharding],
        kernels: list[DynamicKernel],
        *,
        prefix: str,
        parameters: Mapping[str, nn.Parameter],
        process_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._prefix = prefix
        self._parameters = parameters
        self.process_group = process_group
        self.device = device
        self._rank = dist.get_rank()
        self.kernels = kernels
        self.shapes = {
            config.name: _shape_of(config, plan, places_of(shardings[config.name]))
            for config in configs
        }

    @property
    def shown(self) -> list[str]:
        """Names of the parameters without rows in the module's state dict."""
        return [f"{self._prefix}{name}.weight" for name in self.shapes]

    # -- saving ---------------------------------------------------------------------------------

    def entries(self) -> dict[str, TableEntry | Tensor]:
        """Return the entries of all tables, by their names in the module's state dict.

        Raises:
            RuntimeError: rows lie in a store.
        """
        also_take_sizes(take_saved_sizes)
        for kernel in self.kernels:
            kernel.tables.group.tables.check_in_memory("state_dict")
            kernel.tables.group.materialize()
        local = {name: list(self.local(shape)) for name, shape in self.shapes.items()}
        contents = {
            name: [
                (
                    of,
                    read_content(of.group.tables, of.table),
                    read_counts(of.group.tables, of.table),
                )
                for of in tables
            ]
            for name, tables in local.items()
        }
        here = {
            name: {
                of.place: (
                    content.ids.numel(),
                    0 if counted is None else counted.ids.numel(),
                    optimizer_steps(of.group.tables, of.table),
                    int(of.group.index.clock[Clock.STEP]),
                    next_now(of.group.tables) if of.group.config.keeps_time else 0,
                )
                for of, content, counted in found
            }
            for name, found in contents.items()
        }
        gathered = from_all_ranks(here, self.process_group)
        result: dict[str, TableEntry | Tensor] = {}
        for name, shape in self.shapes.items():
            known = {
                Place(*place): numbers
                for of_rank in gathered
                for place, numbers in of_rank[name].items()
            }
            layout = Layout(
                optimizer_steps=max(numbers[2] for numbers in known.values()),
                clock=max(numbers[3] for numbers in known.values()),
                scores=shape.scores,
                first_columns=tuple(sorted({place.first_column for place in shape.places})),
                half_life=shape.half_life,
                admission_half_life=shape.admission_half_life,
                now=max(numbers[4] for numbers in known.values()),
            )
            saved = save_table(
                shape,
                contents[name],
                {place: numbers[:2] for place, numbers in known.items()},
                layout,
                process_group=self.process_group,
                device=self.device,
            )
            result |= {f"{self._prefix}{name}.{entry}": value for entry, value in saved.items()}
        return result

    def local(self, shape: TableShape) -> Iterator[LocalTable]:
        """Yield the shards of a table on this rank."""
        for kernel in self.kernels:
            for t, shard in enumerate(kernel.tables.shards):
                if shard.name != shape.name:
                    continue
                (place,) = (
                    place
                    for place in shape.places
                    if (place.rank, place.first_column) == (self._rank, shard.first_column)
                )
                yield LocalTable(place, kernel.tables.group, t, shard)

    # -- loading --------------------------------------------------------------------------------

    def load(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take the tables' entries out of a state dict and replace the tables' contents.

        Tables stay unchanged in these cases:

        * an entry is wrong, or is missing and ``strict`` is True;
        * the tables are excluded from state dicts.

        ``weight`` without further entries is the state of a static table: its rows get the ids 0,
        1, ...
        """
        if leaves_tables_out():
            for name, parameter in self._parameters.items():
                state_dict[f"{prefix}{self._prefix}{name}.weight"] = parameter.detach()
            return
        given: dict[str, dict[str, Any]] = {}
        for name in self.shapes:
            start = f"{prefix}{self._prefix}{name}."
            given[name] = {
                key.removeprefix(start): state_dict.pop(key)
                for key in list(state_dict)
                if key.startswith(start)
            }
            if self.shapes[name].optimizer == NOT_TRAINED:  # accepts a trained table
                given[name] = {
                    entry: value
                    for entry, value in given[name].items()
                    if not entry.startswith(state_key(""))
                }
            # entries of the module itself
            state_dict[f"{start}weight"] = self._parameters[name].detach()
        errors = self._differences_of_ranks(given)
        layouts: dict[str, Layout | None] = {}
        lacking: list[str] = []
        unknown: list[str] = []
        for name, found in given.items():
            start = f"{prefix}{self._prefix}{name}."
            shape = self.shapes[name]
            try:
                layout = Layout.of(name, found["layout"]) if "layout" in found else None
            except ValueError as error:
                errors.append(str(error))
                continue
            layouts[name] = layout
            lacking += [f"{start}{entry}" for entry in missing_entries(shape, found, layout)]
            unknown += [f"{start}{entry}" for entry in found if not is_entry(entry)]
            if "weight" in found:
                errors += check_entries(shape, found, layout)
        missing_keys += lacking
        unexpected_keys += unknown
        if strict and lacking and not errors:
            errors.append(
                "dynamic tables: load_state_dict(..., strict=False) of DistributedModelParallel, "
                "or of the sharded collection, loads rows without optimizer state, scores or "
                "counts, which start anew"
            )
        if errors or (strict and unknown):  # the same on all ranks
            error_msgs += errors
            return
        given = {name: found for name, found in given.items() if "weight" in found}
        loads: dict[str, TableLoad] = {}
        try:
            for name, found in given.items():
                loads[name] = TableLoad(
                    self.shapes[name],
                    found,
                    layouts[name],
                    self.local(self.shapes[name]),
                    process_group=self.process_group,
                    device=self.device,
                )
                loads[name].check()
            ranks_of(self.process_group).run(lambda: _choose(loads.values()))
        except ValueError as error:
            error_msgs.append(str(error))
            return
        self._replace(loads)

    def _differences_of_ranks(self, given: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return the differences between the ranks' states, which would make ranks wait forever."""
        entries = {Option(name, "entries"): comparable(sorted(of)) for name, of in given.items()}
        try:
            check_agreement("load_state_dict", entries, self.process_group)
        except ValueError as error:
            return [str(error)]
        return []

    def _replace(self, loads: Mapping[str, TableLoad]) -> None:
        """Replace all tables while signals are deferred; all ranks raise an error of one rank."""
        ranks = ranks_of(self.process_group)
        parts = [part for load in loads.values() for part in load.parts.values()]

        def write() -> None:
            failures = [load.write() for load in loads.values()]
            ranks.run(lambda: raise_first(failures))

        with defer_signals():
            replace_content(ranks, loaders_of(parts), write, lambda: publish_all(parts))


def _choose(loads: Iterable[TableLoad]) -> None:
    for load in loads:
        load.choose()


def _shape_of(config: Any, plan: ModulePlan, places: list[Place]) -> TableShape:
    options = plan.options[config.name]
    table = TableConfig(
        config.name,
        config.embedding_dim,
        config.feature_names,
        policy=options.policy,
        feature_policies=options.feature_policies,
    )
    return TableShape(
        config.name,
        config.embedding_dim,
        row_dtype_of(config.name, config.data_type),
        plan.optimizers[config.name],
        score_words_of([table], False),
        isinstance(options.policy.admission, AdmitFrequent),
        places,
        options.policy.half_life_ticks,
        options.policy.admission_ticks,
    )


__all__ = ["ModuleState"]
