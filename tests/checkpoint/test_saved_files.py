"""Saved files hold the same as when they were written, and go on from there.

Most tests read what ``saved_files.py`` has written, with torch 2.13.
"""

from __future__ import annotations

import dataclasses
import gzip
import pickle
from typing import Any

import pytest
import torch
from saved_files import (
    IDS,
    SAVED,
    Numbers,
    batches,
    frozen_numbers,
    group_numbers,
    kept,
    modules,
    numbers_of,
    optimized,
    optimizers,
    program_inputs,
    program_numbers,
    recis_batch,
    recis_model,
    recis_numbers,
    recis_optimizer,
    recis_values,
    recorded,
    table_modules,
    train,
    train_recis,
    values,
)
from torch import Tensor, nn
from typing_extensions import is_typeddict

import torch_dynemb as td
from torch_dynemb import recis

pytestmark = pytest.mark.cpu_only("reads files that were written on a CPU")

PICKLES = [path.name for path in sorted(SAVED.glob("*.gz")) if not path.name.startswith("numbers")]
HERE = [n for n in PICKLES if "torchrec" not in n and "dcp" not in n and "state" not in n]
# Classes without a file, and why.
NOT_SAVED = {
    "Initializer": "a base",
    "FeatureOp": "a base",
    "FusedOP": "a base",
    "RowFilter": "a base",
    "SparseOptimizer": "a base",
    "FusedOptimizer": "raises an error that says to save its state_dict()",
    "SplitOptimizer": "raises an error that says to save its state_dict()",
    "SparseAdam": "raises an error that says to save its state_dict()",
    "SparseAdamW": "as SparseAdam",
    "SparseAdamWTF": "as SparseAdam",
    "SparseAdagrad": "as SparseAdam",
    "SparseRowWiseAdagrad": "as SparseAdam",
    "ReplacementReport": "is the report of one call",
    "StepWith": "connects an optimizer of this process with tables",
    "Slot": "reads a table by functions of its own",
    "SlotGroup": "has slots",
    "ExternalStore": "has a store of the user's",
    "SSDStore": "is of tables that raise an error that says to use checkpoint.save",
    "AtLeast": "is the argument of one call",
    "Top": "is the argument of one call",
    "StorageStats": "figures of a moment",
    "RowBatch": "is a copy of rows at one moment",
    "IdNames": "is saved as state_dict() by checkpoint.save(state=)",
    "SampledSoftmaxLoss": "has no state: is made again beside its table",
    "FullSoftmaxLoss": "as SampledSoftmaxLoss",
    "InBatchNegatives": "is an argument of a loss",
    "UniformNegatives": "as InBatchNegatives",
    "FrequencyNegatives": "as InBatchNegatives",
    "FrozenDynamicEmbedding": "is made again of a saved model, by freeze()",
    "FrozenEmbeddingEngine": "is made again of a saved model, by freeze()",
    "FrozenHashTable": "is made again of a saved model, by freeze()",
}


def expected(file: str) -> Numbers:
    """The numbers that were written with a file."""
    numbers: Numbers = kept("numbers.pt.gz", weights_only=True)
    start = f"{file}: "
    return {name.removeprefix(start): n for name, n in numbers.items() if name.startswith(start)}


def assert_numbers(given: Numbers, known: Numbers) -> None:
    """Exactly equal, dtypes included."""
    assert given.keys() == known.keys()
    for name, value in known.items():
        assert given[name].dtype == value.dtype, name
        assert torch.equal(given[name], value), name


def assert_same(given: Any, made: Any) -> None:
    """A value of a file is what the code now makes; what it has beyond that does not count."""
    assert type(given) is type(made)
    if isinstance(made, Tensor):
        torch.testing.assert_close(given, made)
    elif isinstance(made, td.TableGroup):
        assert given.names == made.names
    elif isinstance(made, dict):
        assert list(given) == list(made)
        for name, value in made.items():
            assert_same(given[name], value)
    elif isinstance(made, tuple | list):
        assert len(given) == len(made)
        for one, other in zip(given, made, strict=True):
            assert_same(one, other)
    elif dataclasses.is_dataclass(made):
        for field in dataclasses.fields(made):
            assert_same(getattr(given, field.name), getattr(made, field.name))
    elif hasattr(made, "__dict__") and type(made).__module__.startswith("torch_dynemb"):
        assert_same({name: getattr(given, name) for name in vars(made)}, vars(made))
    elif not isinstance(made, Exception):
        assert given == made


def assert_goes_on(module: nn.Module) -> None:
    """It can be trained, saved and loaded."""
    before = numbers_of(module)
    train(module.train())
    after = numbers_of(module)
    steps = [name for name in after if name.endswith("steps")]
    assert any(int(after[name]) == int(before[name]) + 1 for name in steps)
    rows = [name for name in after if name.endswith(" rows")]
    assert any(not torch.equal(after[name], before[name]) for name in rows)
    assert_numbers(numbers_of(pickle.loads(pickle.dumps(module))), after)


def test_a_module_that_was_saved_whole_holds_the_same_and_is_trained_on() -> None:
    module = kept("modules.pt.gz")
    assert_numbers(numbers_of(module), expected("modules"))
    for path, part in table_modules(modules()).items():
        loaded = table_modules(module)[path]
        assert_same(loaded.group.config.tables, part.group.config.tables)
        assert loaded.output_dtype == part.output_dtype
        if part.trainable:
            assert type(loaded.optimizer) is type(part.optimizer)
    assert_goes_on(module)


def test_a_module_of_every_optimizer_that_was_saved_whole_is_trained_on() -> None:
    module = kept("optimized.pt.gz")
    assert_numbers(numbers_of(module), expected("optimized"))
    for name, part in module.items():
        assert part.group.config.optimizer == optimizers()[name]
        fresh = td.DynamicEmbedding(4, optimizer=optimizers()[name]).optimizer
        given = part.optimizer.state_dict()["param_groups"][0]
        for entry, value in fresh.state_dict()["param_groups"][0].items():
            if entry != "name":
                assert given[entry] == value
    assert_goes_on(module)


def test_states_of_a_model_and_its_optimizers_are_loaded_and_trained_on() -> None:
    state = kept("states.pt.gz", weights_only=True)
    module = modules()
    train(module, 1)
    parts = table_modules(module)
    parts["bag"].optimizer.param_groups[0]["lr"] = 0.75
    module.load_state_dict(state["model"])
    for path, saved in state["optimizers"].items():
        parts[path].optimizer.load_state_dict(saved)
    assert parts["bag"].optimizer.param_groups[0]["lr"] == 0.25
    assert_numbers(numbers_of(module), expected("modules"))
    assert_goes_on(module)
    twin = modules()
    twin.load_state_dict(module.state_dict())
    assert_numbers(numbers_of(twin), numbers_of(module))


def test_a_frozen_model_gives_the_same_outputs() -> None:
    module = kept("frozen.pickle.gz")
    assert_numbers(frozen_numbers(module), expected("frozen"))
    again = pickle.loads(pickle.dumps(module))
    again.load_state_dict(module.state_dict())
    assert_numbers(frozen_numbers(again), expected("frozen"))


def test_values_are_those_that_were_saved() -> None:
    given, made = kept("values.pt.gz"), values()
    assert_numbers(group_numbers(given["group"]), expected("group"))
    assert given["stats"].size == made["stats"].size == 4
    for name in ("stats", "found"):  # bytes, and where rows lie
        del given[name], made[name]
    assert_same(given, made)
    given["group"].insert(0, IDS + 1)
    assert given["group"].size(0) == 4


def test_a_recis_model_that_was_saved_whole_is_trained_on() -> None:
    model = kept("recis.pt.gz")
    assert_numbers(recis_numbers(model), expected("recis"))
    assert model.train()["features"](recis_batch())["mod"].values().max() < 7
    optimizers = [of.optimizer for of in recis.filter_out_sparse_param(model).values()]
    model["engine"]({"clicked": IDS[:, None], "shown": IDS[:, None], "user": IDS, "tag": IDS})[
        "clicked"
    ].sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    changed = recis_numbers(model)
    assert not torch.equal(changed["output clicked"], expected("recis")["output clicked"])
    assert_numbers(recis_numbers(pickle.loads(pickle.dumps(model))), changed)


def test_a_recis_state_is_loaded_and_trained_on() -> None:
    state = kept("recis_state.pt.gz", weights_only=True)
    model, twin = recis_model(), recis_model()
    optimizer = recis_optimizer(model)
    recis_optimizer(twin)
    train_recis(model, optimizer)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert_numbers(recis_numbers(model), expected("recis"))
    train_recis(model.train(), optimizer)
    twin.load_state_dict(model.state_dict())
    assert_numbers(recis_numbers(twin), recis_numbers(model))


def test_values_of_recis_are_those_that_were_saved() -> None:
    given, made = kept("recis_values.pickle.gz"), recis_values()
    embedding = recis.DynamicEmbedding(recis.EmbeddingOption(4, 5, shared_name="e"))
    assert embedding(given.pop("prepared")).shape == (len(IDS), 4)
    del made["prepared"]
    assert str(given["error"]) == str(made["error"])
    made["ids map"] = given["ids map"]._replace(ids=made["ids map"].ids)  # rows lie anywhere
    assert_same(given, made)


def test_batches_are_loaded_as_those_classes_that_are_known_to_be_safe() -> None:
    assert_same(kept("batches.pt.gz", weights_only=True), batches())


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="torch 2.13 has written the programs, which older ones need not read",
)
def test_exported_programs_give_the_same_outputs() -> None:
    outputs = {}
    for name, inputs in program_inputs().items():
        program = torch.export.load(SAVED / name)
        assert program.example_inputs is not None
        assert_same(program.example_inputs[0], inputs)
        outputs[name] = program.module()(*inputs)
    assert_numbers(program_numbers(outputs), expected("programs"))


@pytest.mark.parametrize("package", [td, recis], ids=lambda package: package.__name__)
def test_a_file_has_every_public_class_whose_instances_can_be_pickled(package: Any) -> None:
    public = {name: getattr(package, name) for name in package.__all__}
    # instances of a TypedDict are dicts
    classes = {n for n, of in public.items() if isinstance(of, type) and not is_typeddict(of)}
    found = {name for file in HERE for _, name in recorded(file)[1]}
    assert classes - found == classes & NOT_SAVED.keys()


def test_what_stands_in_no_file_says_so_when_it_is_pickled() -> None:
    table = recis.HashTable([4], max_rows=10)
    slots = table.slot_group()
    live = [part.optimizer for part in (optimized()["SGD"], modules()["bag"])]
    live.append(recis.SparseAdam({"table": table}))
    for thing in (*live, slots, slots.slots()[0]):
        assert type(thing).__name__ in NOT_SAVED
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError), match="pickle"):
            pickle.dumps(thing)


def test_files_are_small_and_name_no_path_of_a_machine() -> None:
    files = [path for path in SAVED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 400_000
    for path in files:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        for place in (b"/tmp/", b"/home/", b"/root/", b"/usr/", b"site-packages"):
            assert place not in content, path
