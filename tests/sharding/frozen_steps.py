"""What ranks do in tests of read-only copies of sharded models."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from jagged_batches import batches_of_ranks, keyed_jagged
from quick_packages import QUICK
from sharded_models import Table, output_names, sharded
from torch import Tensor, nn
from torch._inductor import config
from torchrec.inference.modules import quantize_inference_model

import torch_dynemb as td
from torch_dynemb import serving
from torch_dynemb.ops.columns import Meta
from torch_dynemb.torchrec import TableOptions, table_sizes

SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
TRAINED, VOCABULARY = 4, 7  # ids that training meets, and of static tables


class Frozen(NamedTuple):
    """What a rank has seen.

    Attributes:
        live: outputs of the sharded model in eval mode.
        frozen: outputs of its copy for the same batch; None: this rank has got none.
        sizes: ids of the dynamic tables of the copy.
        all_sizes: of those of the model, on all ranks.
    """

    live: dict[str, Tensor]
    frozen: dict[str, Tensor] | None
    sizes: dict[str, int]
    all_sizes: dict[str, int]


def batch(rank: int, tables: Sequence[Table], kind: str, step: int, vocabulary: int) -> Any:
    """The batch of a rank, as TorchRec takes it."""
    features = list(dict.fromkeys(feature for _, _, feature in output_names(tables)))
    batches = batches_of_ranks(kind, features, dist.get_world_size(), step, vocabulary)
    return keyed_jagged(batches[rank], kind)


def trained(
    rank: int, tables: Sequence[Table], kind: str, options: dict[str, TableOptions] | None = None
) -> Any:
    """A sharded model with a dense layer, after two steps."""

    def with_dense(model: nn.Module) -> None:
        torch.manual_seed(3)
        model.over = nn.Linear(tables[0].dim, 2)

    model = sharded(
        tables,
        fused_params=dict(SGD),
        weighted=kind.startswith("weighted"),
        options=options,
        prepare=with_dense,
    )
    dense = torch.optim.SGD(model.module.over.parameters(), lr=0.1)
    for step in range(2):
        outputs = model(batch(rank, tables, kind, step, TRAINED))
        torch.stack([of.square().sum() for of in outputs.values()]).sum().backward()
        dense.step()
        dense.zero_grad()
        model.fused_optimizer.step()
    model.eval()
    return model


def sizes_of(model: nn.Module) -> dict[str, int]:
    """Ids by table, of all frozen modules."""
    sizes: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, td.serving.FrozenModule):
            sizes |= module.sizes()
    return sizes


def through_file(model: nn.Module) -> nn.Module:
    """The model after saving and loading."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


def frozen(
    rank: int,
    tables: Sequence[Table],
    kind: str,
    ranks: Any,
    options: dict[str, TableOptions] | None = None,
) -> Frozen:
    """Trains, freezes, and looks up ids that training has met, and others."""
    model = trained(rank, tables, kind, options)
    copy: nn.Module | None = td.freeze(model, ranks=ranks)
    features = batch(rank, tables, kind, 9, VOCABULARY)
    with torch.no_grad():
        live = {name: of.clone() for name, of in model(features).items()}
    sizes = {name.rpartition(".")[2]: size for name, size in table_sizes(model).items()}
    if copy is None:
        return Frozen(live, None, {}, sizes)
    assert type(copy) is type(model.module)
    with torch.no_grad():
        outputs = through_file(copy)(features)
    return Frozen(live, outputs, sizes_of(copy), sizes)


def updated_live(rank: int, tables: Sequence[Table]) -> tuple[bool, bool]:
    """Whether a live copy of a sharded model gives what a frozen one does, and takes updates."""
    model = trained(rank, tables, "plain")
    frozen_copy = td.freeze(model)
    copy = serving.live(frozen_copy, headroom=3)
    features = batch(rank, tables, "plain", 9, VOCABULARY)
    with torch.no_grad():
        before, expected = copy(features), frozen_copy(features)
        same = all(torch.equal(before[name], expected[name]) for name in expected)
        for live_tables in serving.live_tables(copy).values():
            for number, name in enumerate(live_tables.names):
                ids = torch.arange(VOCABULARY)
                ids = ids[: live_tables.sizes()[name] + 3]
                dim = int(live_tables.tensors().meta[number, Meta.DIM])
                live_tables.erase(name, ids)
                live_tables.update(name, ids[:3], torch.full((3, dim), 7.0))
        after = copy(features)
    return same, any(not torch.equal(before[name], after[name]) for name in after)


def packaged(
    rank: int, tables: Sequence[Table], folder: str, shapes: Callable[[Any], Any]
) -> tuple[bool, bool, bool] | None:
    """Whether a package of a sharded model gives what a live copy does, before and after an update,
    and whether that changed anything. None: this rank has got no copy."""
    model = trained(rank, tables, "plain")
    copy = td.freeze(model, ranks="first")
    if copy is None:
        return None

    def features() -> Any:
        """New features: reading them adds offsets, which makes them another input."""
        return batch(rank, tables, "plain", 9, VOCABULARY)

    example = features()
    with config.patch(QUICK):
        serving.export(copy, folder, (example,), dynamic_shapes=(shapes(example),), headroom=5)
    served = serving.load(folder)
    live_copy = serving.live(copy, headroom=5)

    def same() -> bool:
        found, expected = served.run(features()), live_copy(features())
        return all(torch.equal(found[name], of) for name, of in expected.items())

    with torch.no_grad():
        before = served.run(features())
        results = [same()]
        for path, live_tables in serving.live_tables(live_copy).items():
            for name in live_tables.names:
                table = f"{path.rpartition('.')[0]}.{name}".lstrip(".")
                rows = torch.full((3, served.tables[table].embedding_dim), 7.0)
                served.apply(table, torch.arange(3), rows)
                live_tables.update(name, torch.arange(3), rows)
        results.append(same())
        after = served.run(features())
    return results[0], results[1], any(not torch.equal(before[n], of) for n, of in after.items())


def stored_in_8_bits(rank: int, tables: Sequence[Table]) -> tuple[float, bool]:
    """How far a copy with rows of int8 is from the model, as a share of the largest output of each
    feature, and whether its tables have such rows."""
    model = trained(rank, tables, "plain")
    copy = td.freeze(model, rows="int8")
    features = batch(rank, tables, "plain", 9, VOCABULARY)
    with torch.no_grad():
        live = {name: of.clone() for name, of in model(features).items()}
        given = through_file(copy)(features)
    parts = [part for part in copy.modules() if isinstance(part, serving.FrozenTables)]
    in_bytes = [part.get_buffer("weights0").dtype == torch.uint8 for part in parts]
    far = max(float((given[name] - of).abs().max() / of.abs().max()) for name, of in live.items())
    return far, len(in_bytes) > 0 and all(in_bytes)


def refused(rank: int, tables: Sequence[Table]) -> None:
    """Raises what freezing a rank's own part of such tables raises."""
    td.freeze(trained(rank, tables, "plain"), ranks="own")


def frozen_without_memory(rank: int, tables: Sequence[Table], ranks: Any) -> None:
    """Raises what freezing raises where the first rank has too little memory."""
    model = trained(rank, tables, "plain")
    free = 10 if rank == 0 else 1 << 60
    with mock.patch("torch_dynemb.serving.gathering.ops.available_memory", return_value=free):
        td.freeze(model, ranks=ranks)


def quantized_by_torchrec(rank: int, tables: Sequence[Table]) -> bool:
    """Whether TorchRec's quantization of a copy gives the bits of a copy with rows of int8."""
    model = trained(rank, tables, "plain")
    expected = td.freeze(model, rows="int8")
    quantized = quantize_inference_model(td.freeze(model))
    features = batch(rank, tables, "plain", 9, VOCABULARY)
    with torch.no_grad():
        outputs, wanted = quantized(features), expected(features)
    return all(torch.equal(outputs[name], of) for name, of in wanted.items())
