"""BPR of RecBole on its sample of MovieLens, with static or dynamic tables.

``build/programs/bin/python tests/programs/recbole_run.py dynamic`` prints a line of JSON with the
metrics.
"""

from __future__ import annotations

import json
import sys
import tempfile

import numpy as np
import torch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.model.general_recommender import BPR
from recbole.utils import get_trainer, init_seed

import torch_dynemb as td

# names that NumPy 2 has no more, and RecBole 1.2.1 reads
np.float_, np.complex_, np.unicode_ = np.float64, np.complex128, np.str_


class DynamicBPR(BPR):
    """BPR that scores all items by looking them up: a dynamic table has no ``weight``."""

    def full_sort_predict(self, interaction):
        users = self.get_user_embedding(interaction[self.USER_ID])
        return (users @ self.item_embedding(torch.arange(self.n_items)).T).view(-1)


def settings(folder: str) -> dict[str, object]:
    """Settings of a run: a random split of each user, scores of all items."""
    return {
        "dataset": "ml-100k",
        "epochs": 8,
        "eval_step": 1000,
        "metrics": ["Recall"],
        "topk": [10, 20],
        "valid_metric": "Recall@10",
        "state": "ERROR",
        "use_gpu": False,
        "worker": 0,
        "learning_rate": 0.003,
        "train_batch_size": 2048,
        "eval_batch_size": 65536,
        "checkpoint_dir": folder,
        "eval_args": {
            "split": {"RS": [0.8, 0.1, 0.1]},
            "group_by": "user",
            "order": "RO",
            "mode": "full",
        },
    }


def run(dynamic: bool, seed: int = 1) -> dict[str, float]:
    """Train and evaluate; return recall by cutoff."""
    with tempfile.TemporaryDirectory() as folder:
        config = Config(model="BPR", config_dict=settings(folder))
        init_seed(seed, True)
        dataset = create_dataset(config)
        train, _, test = data_preparation(config, dataset)
        init_seed(seed, True)
        model = (DynamicBPR if dynamic else BPR)(config, train.dataset)
        if dynamic:
            td.replace_embeddings(model, optimizer=td.Adam(lr=config["learning_rate"]))
        trainer = get_trainer(config["MODEL_TYPE"], "BPR")(config, model)
        if dynamic:
            td.step_with(trainer.optimizer, model)
        trainer.fit(train, saved=False, show_progress=False)
        result = trainer.evaluate(test, load_best_model=False)
    return {metric: float(value) for metric, value in result.items()}


if __name__ == "__main__":
    kind = sys.argv[1]
    sys.argv = sys.argv[:1]  # RecBole reads options from there
    torch.set_num_threads(1)
    print(json.dumps(run(kind == "dynamic")))
