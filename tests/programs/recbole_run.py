"""BPR and SASRec of RecBole on its sample of MovieLens, with static or dynamic tables.

``build/programs/bin/python tests/programs/recbole_run.py SASRec dynamic`` prints a line of JSON
with the metrics. A third argument is the seed.
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
from recbole.model.sequential_recommender import SASRec
from recbole.utils import get_trainer, init_seed

import torch_dynemb as td

# names that NumPy 2 has no more, and RecBole 1.2.1 reads
np.float_, np.complex_, np.unicode_ = np.float64, np.complex128, np.str_


class DynamicBPR(BPR):
    """BPR that scores all items by looking them up: a dynamic table has no ``weight``."""

    def full_sort_predict(self, interaction):
        users = self.get_user_embedding(interaction[self.USER_ID])
        return (users @ self.item_embedding(torch.arange(self.n_items)).T).view(-1)


class DynamicSASRec(SASRec):
    """SASRec that looks all items up, for its loss and for scores."""

    def scores(self, interaction):
        queries = self.forward(interaction[self.ITEM_SEQ], interaction[self.ITEM_SEQ_LEN])
        return queries @ self.item_embedding(torch.arange(self.n_items)).T

    def calculate_loss(self, interaction):
        return self.loss_fct(self.scores(interaction), interaction[self.POS_ITEM_ID])

    def full_sort_predict(self, interaction):
        return self.scores(interaction)


STATIC = {"BPR": BPR, "SASRec": SASRec}
DYNAMIC = {"BPR": DynamicBPR, "SASRec": DynamicSASRec}
SETTINGS = {
    "BPR": {
        "epochs": 8,
        "learning_rate": 0.003,
        "eval_args": {
            "split": {"RS": [0.8, 0.1, 0.1]},
            "group_by": "user",
            "order": "RO",
            "mode": "full",
        },
    },
    # the last item of each user is predicted, from 20 before it
    "SASRec": {
        "epochs": 5,
        "learning_rate": 0.005,
        "MAX_ITEM_LIST_LENGTH": 20,
        "n_layers": 1,
        "n_heads": 2,
        "hidden_size": 32,
        "inner_size": 64,
        "hidden_dropout_prob": 0.2,
        "attn_dropout_prob": 0.2,
        "loss_type": "CE",
        "train_neg_sample_args": None,
        "eval_args": {
            "split": {"LS": "valid_and_test"},
            "group_by": "user",
            "order": "TO",
            "mode": "full",
        },
    },
}


def settings(model: str, folder: str) -> dict[str, object]:
    """Settings of a run; it is evaluated once, by scores of all items."""
    return {
        "dataset": "ml-100k",
        "eval_step": 1000,
        "metrics": ["Recall"],
        "topk": [10, 20],
        "valid_metric": "Recall@10",
        "state": "ERROR",
        "use_gpu": False,
        "worker": 0,
        "train_batch_size": 2048,
        "eval_batch_size": 65536,
        "checkpoint_dir": folder,
        **SETTINGS[model],
    }


def run(name: str, dynamic: bool, seed: int) -> dict[str, float]:
    """Train and evaluate; return recall by cutoff."""
    with tempfile.TemporaryDirectory() as folder:
        config = Config(model=name, config_dict=settings(name, folder))
        init_seed(seed, True)
        dataset = create_dataset(config)
        train, _, test = data_preparation(config, dataset)
        init_seed(seed, True)
        model = (DYNAMIC if dynamic else STATIC)[name](config, train.dataset)
        if dynamic:
            td.replace_embeddings(model, optimizer=td.Adam(lr=config["learning_rate"]))
        trainer = get_trainer(config["MODEL_TYPE"], name)(config, model)
        if dynamic:
            td.step_with(trainer.optimizer, model)
        trainer.fit(train, saved=False, show_progress=False)
        result = trainer.evaluate(test, load_best_model=False)
    return {metric: float(value) for metric, value in result.items()}


if __name__ == "__main__":
    model, kind, *seed = sys.argv[1:]
    sys.argv = sys.argv[:1]  # RecBole reads options from there
    torch.set_num_threads(1)
    print(json.dumps(run(model, kind == "dynamic", int(seed[0]) if seed else 1)))
