"""DeepFM and MultiTowerDIN of TorchEasyRec on MovieLens, with static or dynamic tables.

``build/programs/ranking/bin/python tests/programs/torcheasyrec_run.py DeepFM dynamic 3`` prints a
line of JSON: for three seeds, the AUC on held-out samples after each epoch, and of the last
checkpoint in a new model. Config, readers, models, train pipeline, checkpoints and metrics are
those of TorchEasyRec (``tzrec``). Tables are

* ``static``: as TorchEasyRec makes them; the data have row numbers,
* ``dynamic``: all of a collection's tables, by the sharders; the data have hashes of 64 bits,
* ``dynamicemb``: users and items, by ``dynamicemb`` blocks of the config; the others are static.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pyarrow as pa
import torch
import torch.distributed as dist
from deepfm_run import FIELDS, read
from fetch import CLONES
from pyarrow import parquet
from torchrec.distributed.planner import Topology

import torch_dynemb as td
from torch_dynemb.compat.dynamicemb import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
    register_as_dynamicemb,
)

HISTORY = 10  # items
EPOCHS = 4
BLOCKS = ("user_id", "item_id", "history")  # with dynamicemb blocks
# fields with hashes, by tables
HASHED = {"static": (), "dynamic": FIELDS, "dynamicemb": ("user_id", "item_id")}


class Missing(ModuleType):
    """A package that no index has: all of its names exist, and raise when they are called."""

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise ModuleNotFoundError(f"{self.__name__}: the package is not installed")


def replace_missing_packages() -> None:
    """Let TorchEasyRec import what it does not need for encoded ids in parquet files.

    These are pyfg, which makes features of raw text, graphlearn, which samples negatives, and
    common_io, which reads MaxCompute tables.
    """
    of_graphlearn = ("graphlearn.python", "graphlearn.python.data", "graphlearn.python.data.values")
    for name in ("pyfg", "common_io", "graphlearn", *of_graphlearn):
        sys.modules[name] = Missing(name)


def write_samples(folder: Path, hashed: tuple[str, ...]) -> dict[str, int]:
    """Write parquet files for training and evaluation; return the number of rows of each field.

    Fields in ``hashed`` have hashes of their texts, the others row numbers from 1 on. A history has
    the last items that the user has rated before.
    """
    users = {row["user_id"]: row for row in read("user")}
    items = {row["item_id"]: row for row in read("item")}
    numbers: dict[str, dict[str, int]] = {field: {} for field in FIELDS}
    rows, seen = [], defaultdict[str, list[int]](list)
    for of in sorted(read("inter"), key=lambda of: float(of["timestamp"])):
        texts = {**users[of["user_id"]], **items[of["item_id"]], **of}
        row: dict[str, Any] = {
            field: numbers[field].setdefault(texts[field], len(numbers[field]) + 1)
            for field in FIELDS
        }
        history = seen[of["user_id"]]
        row |= {"history": history[-HISTORY:], "label": int(float(of["rating"]) > 3)}
        history.append(row["item_id"])
        rows.append(row)
    random.Random(0).shuffle(rows)
    for field in hashed:
        ids = dict(enumerate(td.hash_strings(list(numbers[field])).tolist(), start=1))
        for row in rows:
            row[field] = ids[row[field]]
            if field == "item_id":
                row["history"] = [ids[number] for number in row["history"]]
    rows = [row for row in rows if row["history"]]
    tenth = len(rows) // 10
    for part, of_part in {"eval": rows[:tenth], "train": rows[tenth:]}.items():
        (folder / part).mkdir()
        parquet.write_table(pa.Table.from_pylist(of_part), folder / part / "0.parquet")
    return {field: len(of_field) + 1 for field, of_field in numbers.items()}


def feature(name: str, rows: int, tables: str) -> str:
    """Return the config of a feature."""
    block = tables == "dynamicemb" and name in BLOCKS
    kind = "sequence_id_feature" if name == "history" else "id_feature"
    size = f"dynamicemb {{ max_capacity: {rows} }}" if block else f"num_buckets: {rows}"
    shared = 'embedding_name: "item_id_emb"' if name in ("history", "item_id") else ""
    return (
        f'feature_configs {{ {kind} {{ feature_name: "{name}" expression: "user:{name}" '
        f"embedding_dim: 16 {shared} {size} }} }}\n"
    )


def config(folder: Path, model: str, tables: str, rows: dict[str, int]) -> str:
    """Return TorchEasyRec's config of a run, as text."""
    names = [*FIELDS, *(["history"] if model == "MultiTowerDIN" else [])]
    features = "".join(feature(n, rows.get(n, rows["item_id"]), tables) for n in names)
    deep = " ".join(f'feature_names: "{name}"' for name in FIELDS)
    groups = f'feature_groups {{ group_name: "deep" {deep} group_type: DEEP }}\n'
    if model == "DeepFM":
        groups += f'feature_groups {{ group_name: "wide" {deep} group_type: WIDE }}\n'
        layers = "deepfm { deep { hidden_units: [64, 64] } }"
    else:
        groups += (
            'feature_groups { group_name: "seq" feature_names: "item_id" '
            'feature_names: "history" group_type: SEQUENCE }\n'
        )
        layers = (
            "multi_tower_din { towers { input: 'deep' mlp { hidden_units: [64, 64] } } "
            "din_towers { input: 'seq' attn_mlp { hidden_units: [16] } } "
            "final { hidden_units: [32] } }"
        )
    return f"""
train_input_path: "{folder}/train/*.parquet"
eval_input_path: "{folder}/eval/*.parquet"
model_dir: "{folder}/model"
train_config {{
    sparse_optimizer {{ adagrad_optimizer {{ lr: 0.05 }} constant_learning_rate {{ }} }}
    dense_optimizer {{ adam_optimizer {{ lr: 0.001 }} constant_learning_rate {{ }} }}
    num_epochs: {EPOCHS}
    save_checkpoints_epochs: 1
    use_tensorboard: false
}}
eval_config {{ }}
data_config {{
    batch_size: 1024
    dataset_type: ParquetDataset
    fg_mode: FG_NONE
    label_fields: "label"
    num_workers: 1
    pin_memory: false
}}
{features}
model_config {{
{groups}
{layers}
metrics {{ auc {{ }} }}
losses {{ binary_cross_entropy {{ }} }}
}}
"""


def create_planner(device: torch.device, batch_size: int, **more: Any) -> Any:
    """Return the planner of dynamic tables, with the constraints of the config's blocks."""
    constraints: dict[str, Any] = {}
    for _, module in more["model"].named_modules():
        if hasattr(module, "parameter_constraints"):
            found = module.parameter_constraints()
            constraints |= {name.rpartition(".")[2]: of for name, of in found.items()}
    ranks = dist.get_world_size()
    topology = Topology(world_size=ranks, local_world_size=ranks, compute_device=device.type)
    return DynamicEmbeddingShardingPlanner(
        topology=topology, batch_size=batch_size, constraints=constraints
    )


def make_dynamic(tables: str) -> None:
    """Let TorchEasyRec make dynamic tables."""
    from tzrec.utils import dynamicemb_util

    chosen = "all" if tables == "dynamic" else None
    if tables == "dynamicemb":
        # its import of names for GPUs, which it patches, has failed silently
        dynamicemb_util.has_dynamicemb = True
        dynamicemb_util.DynamicEmbParameterConstraints = DynamicEmbParameterConstraints
    import tzrec.main

    tzrec.main.create_planner = create_planner
    tzrec.main.get_default_sharders = lambda: [
        DynamicEmbeddingBagCollectionSharder(tables=chosen),
        DynamicEmbeddingCollectionSharder(tables=chosen),
    ]


def run(folder: Path, model: str, tables: str, seed: int) -> list[float]:
    """Train; return the AUC on held-out samples after each epoch, and of the last checkpoint."""
    from tzrec.main import evaluate, train_and_evaluate

    rows = write_samples(folder, HASHED[tables])
    (folder / "run.config").write_text(config(folder, model, tables, rows))
    torch.manual_seed(seed)
    train_and_evaluate(str(folder / "run.config"))
    dist.destroy_process_group()
    evaluate(str(folder / "model/pipeline.config"))  # a new model, from the checkpoint
    dist.destroy_process_group()
    results = [
        line
        for name in ("train_eval_result_v2.txt", "eval_result.txt")
        for line in (folder / "model" / name).read_text().splitlines()
    ]
    return [json.loads(line)["auc"] for line in results]


if __name__ == "__main__":
    torch.set_num_threads(1)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {**alone, "MASTER_PORT": "0"}
    sys.path.insert(0, str(CLONES / "TorchEasyRec"))
    replace_missing_packages()
    model, tables, seeds = sys.argv[1:]
    if tables != "static":
        register_as_dynamicemb()
        make_dynamic(tables)
    found = []
    for seed in range(int(seeds)):
        with tempfile.TemporaryDirectory() as folder:
            found.append(run(Path(folder), model, tables, seed))
    print(json.dumps({"auc": found}))
