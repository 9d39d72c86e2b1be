"""A module with state entries of every kind; saved/format3.pt is the state of one.

``__main__`` writes it; ``test_saved_numbers.py`` reads it with whatever the code is now.
"""

from __future__ import annotations

from pathlib import Path

import torch

import torch_dynemb as td

FORMAT_3 = Path(__file__).parent / "saved" / "format3.pt"


def saved_module() -> td.DynamicEmbeddingBagCollection:
    """Three tables in three slabs, with all scores, counts, a sketch and 8-bit state."""
    torch.manual_seed(11)
    return td.DynamicEmbeddingBagCollection(
        [
            td.TableConfig(
                "a",
                4,
                policy=td.Policy(
                    score=("frequency", "timestamp", "custom", "step"), capacity=20, ttl=100
                ),
            ),
            td.TableConfig(
                "b", 4, dtype=torch.float16, policy=td.Policy(admission=td.AdmitFrequent(3))
            ),
            td.TableConfig(
                "c",
                4,
                dtype=torch.bfloat16,
                policy=td.Policy(admission=td.AdmitFrequentSketch(2, 256)),
            ),
        ],
        optimizer=td.Adam(lr=0.1, state_dtype=torch.uint8, row_steps=True),
        max_rows=100,
    )


def train(module: td.DynamicEmbeddingBagCollection, steps: range) -> None:
    """Train steps with batches that depend only on their numbers."""
    module.group.scores.set_batch(0, 5)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = {
            name: torch.randint(0, 40, (10, 3), generator=generator)
            for name in module.feature_names
        }
        module(ids).sum().backward()
        module.optimizer.step(now=1000 + step)
    module.group.erase(0, torch.arange(0, 40, 4))


if __name__ == "__main__":
    module = saved_module()
    train(module, range(4))
    torch.save(dict(module.state_dict()), FORMAT_3)
