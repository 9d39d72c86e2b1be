"""DeepFM and DIN of FuxiCTR on MovieLens (the sample in RecBole), with static or dynamic tables.

``build/programs/ranking/bin/python tests/programs/fuxictr_run.py DeepFM 3`` prints a line of
JSON: the AUC of both on held-out samples for three seeds. Preprocessing, loaders, models, loop,
early stopping and metrics are those of FuxiCTR.
"""

from __future__ import annotations

import csv
import json
import random
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepfm_run import FIELDS, read
from fetch import CLONES

import torch_dynemb as td

sys.path.insert(0, str(CLONES / "FuxiCTR"))
from fuxictr.features import FeatureMap
from fuxictr.preprocess import FeatureProcessor, build_dataset
from fuxictr.pytorch.dataloaders import RankDataLoader
from fuxictr.pytorch.torch_utils import seed_everything
from model_zoo.DeepFM.DeepFM_torch.src.DeepFM import DeepFM
from model_zoo.DIN.src.DIN import DIN

np.unicode_ = np.str_  # a name that NumPy 2 has no more, and keras_preprocessing reads
HISTORY = 10  # items
MODELS = {"DeepFM": DeepFM, "DIN": DIN}
SETTINGS: dict[str, dict[str, Any]] = {
    "DeepFM": {"hidden_units": [64, 64]},
    "DIN": {
        "dnn_hidden_units": [64, 64],
        "attention_hidden_units": [16],
        "din_target_field": ["item_id"],
        "din_sequence_field": ["history"],
    },
}
COMMON = {
    "data_format": "parquet",
    "batch_size": 1024,
    "num_workers": 0,
    "embedding_dim": 16,
    "learning_rate": 1e-3,
    "optimizer": "adam",
    "loss": "binary_crossentropy",
    "metrics": ["AUC"],
    "monitor": "AUC",
    "epochs": 10,
    "verbose": 0,
}


def write_samples(folder: Path, with_history: bool) -> None:
    """Write FuxiCTR's csv files: a tenth of the ratings for each of valid and test."""
    users = {row["user_id"]: row for row in read("user")}
    items = {row["item_id"]: row for row in read("item")}
    names = [*FIELDS, "label", *(["history"] if with_history else [])]
    rows, seen = [], defaultdict[str, list[str]](list)
    for of in sorted(read("inter"), key=lambda of: float(of["timestamp"])):
        row = {**users[of["user_id"]], **items[of["item_id"]], **of}
        row["label"] = str(int(float(of["rating"]) > 3))
        row["history"] = "^".join(seen[of["user_id"]][-HISTORY:])
        seen[of["user_id"]].append(of["item_id"])
        rows.append([row[name] for name in names])
    random.Random(0).shuffle(rows)
    tenth = len(rows) // 10
    parts = {"valid": rows[:tenth], "test": rows[tenth : 2 * tenth], "train": rows[2 * tenth :]}
    for part, of_part in parts.items():
        with (folder / f"{part}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([names, *of_part])


def prepare(folder: Path, model: str) -> FeatureMap:
    """Let FuxiCTR read the csv files, number the values of fields, and write its own files."""
    write_samples(folder, model == "DIN")
    columns: list[dict[str, Any]] = [
        {"name": list(FIELDS), "active": True, "dtype": "str", "type": "categorical"}
    ]
    if model == "DIN":
        columns.append(
            {
                "name": "history",
                "active": True,
                "dtype": "str",
                "type": "sequence",
                "splitter": "^",
                "max_len": HISTORY,
                "share_embedding": "item_id",
                "feature_encoder": None,
            }
        )
    encoder = FeatureProcessor(
        feature_cols=columns,
        label_col={"name": "label", "dtype": "float"},
        dataset_id="movielens",
        data_root=str(folder),
    )
    files = {f"{part}_data": str(folder / f"{part}.csv") for part in ("train", "valid", "test")}
    build_dataset(encoder, **files)
    features = FeatureMap("movielens", str(folder / "movielens"))
    features.load(str(folder / "movielens/feature_map.json"), COMMON)
    return features


def run(name: str, features: FeatureMap, folder: Path, dynamic: bool, seed: int) -> float:
    """Train with early stopping; return the AUC of the best epoch on held-out samples."""
    parts = {f"{part}_data": str(folder / "movielens" / part) for part in ("train", "valid")}
    seed_everything(seed)
    model = MODELS[name](features, model_root=str(folder), **COMMON, **SETTINGS[name])
    if dynamic:
        td.replace_embeddings(model, optimizer=td.Adam(lr=1e-3, row_steps=True))
        td.step_with(model.optimizer, model)
    train, valid = RankDataLoader(features, stage="train", **parts, **COMMON).make_iterator()
    model.fit(train, validation_data=valid, epochs=COMMON["epochs"])
    tested = {"test_data": str(folder / "movielens/test"), **COMMON}
    test = RankDataLoader(features, stage="test", **tested).make_iterator()
    return float(model.evaluate(test)["AUC"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, seeds = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        features = prepare(Path(folder), model)
        found = {
            kind: [
                run(model, features, Path(folder), kind == "dynamic", seed) for seed in range(seeds)
            ]
            for kind in ("static", "dynamic")
        }
    print(json.dumps(found))
