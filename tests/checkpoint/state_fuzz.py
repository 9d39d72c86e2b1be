"""Changes saved states at random and loads them: ``python state_fuzz.py FIRST LAST``.

What loads must train, save, load again and go on equally; all else is refused by a RuntimeError and
leaves the module as it was. Every number is one change, the same in every run.
"""

from __future__ import annotations

import faulthandler
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from state_changes import State, as_bits, changed
from torch import Tensor, nn

import torch_dynemb as td

NOW = 1000  # seconds
SECONDS = 60  # of one change, before it is taken for an endless loop
FROZEN = 10  # every so many is of a read-only copy

# -- modules --------------------------------------------------------------------------------------


def collection(
    policies: dict[str, dict[str, Any]], *, optimizer: Any = None, **arguments: Any
) -> td.DynamicEmbeddingBagCollection:
    """Tables named by letters, of dims 4 and 8 in turn."""
    tables = [
        td.TableConfig(name, 4 + 4 * (t % 2), **config)
        for t, (name, config) in enumerate(policies.items())
    ]
    torch.manual_seed(5)  # of new rows
    arguments = {"max_rows": 400, **arguments}
    return td.DynamicEmbeddingBagCollection(
        tables, optimizer=td.Adam(lr=0.1) if optimizer is None else optimizer, **arguments
    )


def policy(*scores: str, **arguments: Any) -> dict[str, td.Policy]:
    return {"policy": td.Policy(**({"score": scores} if scores else {}), **arguments)}


MODULES: dict[str, Callable[[], td.DynamicEmbeddingBagCollection]] = {
    "plain": lambda: collection({"a": {}, "b": {}, "c": {}}),
    "lru": lambda: collection({"a": policy(capacity=30), "b": {}}),
    "scores": lambda: collection(
        {
            "a": policy("custom", "timestamp", "frequency", capacity=30, ttl=50),
            "b": policy("frequency", capacity=20, protected_steps=2),
        },
        optimizer=td.Adam(lr=0.1, state_dtype=torch.uint8),
    ),
    "timestamps": lambda: collection(
        {"a": policy("timestamp", capacity=25, ttl=3)}, optimizer=td.Adam(lr=0.1, row_steps=True)
    ),
    "counts": lambda: collection(
        {
            "a": policy("frequency", capacity=25, admission=td.AdmitFrequent(3)),
            "b": policy(admission=td.AdmitFrequent(2, half_life_steps=5)),
        },
        optimizer=td.RowWiseAdagrad(lr=0.1),
    ),
    "sketch": lambda: collection(
        {
            "a": policy(capacity=25, admission=td.AdmitFrequentSketch(2, 512, halve_every=2)),
            "b": policy(admission=td.AdmitByChance(0.5)),
        },
        optimizer=td.SGD(lr=0.1),
    ),
    "budget": lambda: collection({"a": policy("frequency"), "b": {}}, memory_budget=40_000),
    "split": lambda: collection(
        {"a": policy(capacity=30), "b": {}}, optimizer=td.Adam(lr=0.1, row_steps=True), split=True
    ),
    "padding": lambda: collection(
        {
            "a": {"padding_idx": 3, "dtype": torch.bfloat16},
            "dim4": {"padding_idx": 0, "dtype": torch.float16, **policy(capacity=30)},
        },
        optimizer=td.RowWiseAdagrad(lr=0.1),
    ),
}


def train(module: Any, steps: range) -> None:
    """Train steps with batches that depend only on their numbers; the first ids are known."""
    for t, config in enumerate(module.group.config.tables):
        if "custom" in config.policy.scores:
            module.group.scores.set_batch(t, 7)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        features = {
            name: torch.randint(0, 25 * (step + 1), (25, 2), generator=generator)
            for name in module.feature_names
        }
        output = module(features)
        (output * torch.randn(output.shape, generator=generator)).sum().backward()
        module.optimizer.step(now=NOW + step if module.group.config.keeps_time else None)


def live(module: Any, first: int) -> None:
    """A piece of a life: ids come, are evicted, removed, and their rows given back."""
    train(module, range(first, first + 2))
    for t in range(len(module.group.names)):
        module.group.erase(t, torch.arange(first, 40, 5))
        module.group.remove(t, norm_below=0.01)
        if "expiry" in module.group.config.layout.score_words:
            module.group.remove(t, expired=True)
    module.group.compact()
    train(module, range(first + 2, first + 3))
    module.eval()
    module({name: torch.arange(60)[None] for name in module.feature_names})
    module.train()
    module.group.usage.tables()


def saved(name: str) -> State:
    """The state of a module that has lived."""
    module = MODULES[name]()
    train(module, range(3))
    for t in range(len(module.group.names)):
        module.group.erase(t, torch.arange(0, 20, 3))
    return plain(module.state_dict())


# -- what must hold -------------------------------------------------------------------------------


def differences(one: State, two: State) -> list[str]:
    """Names of entries with other bits."""

    def same(a: Tensor, b: Tensor) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.equal(as_bits(a), as_bits(b))

    return [name for name in two if name not in one or not same(one[name], two[name])]


def plain(state: State) -> State:
    return {
        name: value.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
        for name, value in state.items()
    }


class Fuzz:
    """Loads changed states into modules, which are kept as long as they refuse."""

    def __init__(self) -> None:
        self.states = {name: saved(name) for name in MODULES}
        self.targets: dict[str, Any] = {}
        self.frozen = {name: self._frozen(name) for name in MODULES}
        self.loaded = 0

    def _frozen(self, name: str) -> nn.Module:
        module = MODULES[name]()
        module.load_state_dict(self.states[name])
        return td.freeze(module)

    def run_frozen(self, number: int) -> None:
        """The same of read-only copies: what loads is read."""
        name = list(MODULES)[number // FROZEN % len(MODULES)]
        frozen = self.frozen[name]
        before = plain(frozen.state_dict())
        state, _ = changed(number, before)
        try:
            frozen.load_state_dict(state)
        except RuntimeError:
            assert not differences(frozen.state_dict(), before), "refused, but changed"
            return
        self.loaded += 1
        assert not differences(frozen.state_dict(), plain(state)), "loaded otherwise than saved"
        features: Any = frozen.feature_names
        ids = {name: torch.arange(-5, 200)[None] for name in features}
        assert torch.equal(as_bits(frozen(ids)), as_bits(frozen(ids)))
        frozen.load_state_dict(before)

    def target(self, name: str) -> tuple[Any, State]:
        """A module that has another life behind it, and its state."""
        if name not in self.targets:
            module = MODULES[name]()
            train(module, range(1, 3))
            self.targets[name] = module, dict(module.state_dict())
        return self.targets[name]

    def run(self, number: int) -> None:
        """Raises AssertionError, or anything but what loading may raise, if something is wrong."""
        if number % FROZEN == 0:
            self.run_frozen(number)
            return
        name = list(MODULES)[number % len(MODULES)]
        state, _ = changed(number, self.states[name])
        module, before = self.target(name)
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            text = str(error)
            assert "corrupted" in text or "expected" in text or "state" in text, text
            assert not differences(module.state_dict(), before), "refused, but changed"
            return
        del self.targets[name]
        self.loaded += 1
        given = plain(state)
        wrong = set(differences(module.state_dict(), given)) - {"slabs", "format", "places"}
        assert not wrong, f"loaded otherwise than saved: {sorted(wrong)}"
        live(module, 3)
        twin = MODULES[name]()
        twin.load_state_dict(module.state_dict())
        wrong = set(differences(twin.state_dict(), dict(module.state_dict())))
        assert not wrong, f"loaded otherwise than saved afterwards: {sorted(wrong)}"
        live(module, 6)
        live(twin, 6)
        wrong = set(differences(twin.state_dict(), dict(module.state_dict())))
        assert not wrong, f"goes on otherwise: {sorted(wrong)}"


def main(first: int, last: int) -> None:
    """Prints a number before its change is loaded, so that a crash has one."""
    torch.set_num_threads(1)
    faulthandler.enable()
    fuzz = Fuzz()
    for number in range(first, last):
        print(number, flush=True)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of steps that a changed count says are missing
                fuzz.run(number)
        except Exception:
            print(f"change {number} failed", flush=True)
            raise
    faulthandler.cancel_dump_traceback_later()
    print(f"{fuzz.loaded} of {last - first} loaded", flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
