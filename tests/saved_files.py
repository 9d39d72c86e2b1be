"""Files of every kind that users keep, in saved/; written by ``__main__`` with torch 2.13.

    PYTHONPATH=tests python tests/saved_files.py

``test_saved_files.py`` reads them with whatever the code is now. A change of a format, or of the
place of a class, writes them anew until version 0.2.0 is released; from then on they load for ever,
and what comes later gets files of its own. ``sharding/saved_shards.py`` is this for TorchRec, and
``checkpoint/saved_modules.py`` for the numbers in a state. Most are compressed: indices of small
tables are mostly zeros.
"""

from __future__ import annotations

import gzip
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from loaded_content import score_words
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb import recis
from torch_dynemb.optim import OptimizerConfig
from torch_dynemb.recis.tables.hooks import GlobalStepFilter
from torch_dynemb.table.config import ColumnShard
from torch_dynemb.table.content import read_content, read_counts

SAVED = Path(__file__).parent / "checkpoint" / "saved"
IDS = torch.tensor([3, -7, 2**62, 11, 5, 12])
NOW = 1000  # seconds
Numbers = dict[str, Tensor]


@td.register_admission("not the id 12")
def not_12(new: td.NewIds) -> Tensor:
    """An admission hook; readers of the files register it under the same name."""
    return new.ids != 12


# -- what is saved -----------------------------------------------------------------------------


def optimizers() -> dict[str, OptimizerConfig]:
    """A config of every kind by the name of its class, with values other than the defaults."""
    clipped: dict[str, Any] = {"clip_value": 3.0, "clip_norm": 7.0, "non_finite": "skip"}
    block: dict[str, Any] = {"state_dtype": torch.uint8, "row_steps": True}
    configs = [
        td.SGD(lr=0.25, weight_decay=0.01, decoupled_weight_decay=True, **clipped),
        td.MomentumSGD(lr=0.25, momentum=0.5, nesterov=True, state_dtype=torch.bfloat16),
        td.LARSSGD(lr=0.25, trust_coefficient=0.5, delayed_gradients="apply"),
        td.Adagrad(lr=0.25, eps=1e-3, initial_accumulator_value=0.5, stochastic_rounding=False),
        td.RowWiseAdagrad(lr=0.25, initial_accumulator_value=0.5),
        td.Ftrl(lr=0.25, l1=0.01, l2=0.02, beta=0.5),
        td.RMSprop(lr=0.25, alpha=0.5, momentum=0.5),
        td.RowWiseRMSprop(lr=0.25, ar_alpha=0.5, min_shrinkage=0.25),
        td.Adadelta(lr=0.25, rho=0.5),
        td.GroupFtrl(lr=0.25, group_l1=0.01),
        td.Adam(lr=0.25, betas=(0.5, 0.75), **block),
        td.AdamW(lr=0.25, weight_decay=0.5),
        td.AdamWTF(lr=0.25, decay_by_lr=False),
        td.AMSGrad(lr=0.25, eps=1e-3),
        td.SmartDecayAdam(lr=0.25),
        td.PartialRowWiseAdam(lr=0.25, state_dtype=torch.bfloat16),
        td.LAMB(lr=0.25),
        td.PartialRowWiseLAMB(lr=0.25),
    ]
    return {type(config).__name__: config for config in configs}


def initializers() -> dict[str, td.Initializer]:
    """An initializer of every kind by the name of its class."""
    kinds: list[td.Initializer] = [
        td.ByColumn(((1, td.Constant(0.5)), (3, td.Uniform(-1.0, 1.0)))),
        td.Constant(0.5),
        td.KaimingNormal(0.5),
        td.KaimingUniform(0.5),
        td.Normal(0.5, 0.25),
        td.TruncatedNormal(0.0, 1.0, -0.5, 0.5),
        td.Uniform(-0.5, 0.25),
        td.XavierNormal(0.5),
        td.XavierUniform(0.5, fan_out=7),
    ]
    return {type(kind).__name__: kind for kind in kinds}


def policies() -> dict[str, td.Policy]:
    """Policies with every admission rule, by its name."""
    return {
        "AdmitBy": td.Policy(admission=td.AdmitBy("not the id 12")),
        "AdmitByChance": td.Policy(admission=td.AdmitByChance(0.5), refused=td.Constant(0.25)),
        "AdmitFrequent": td.Policy(admission=td.AdmitFrequent(2), refused=torch.ones(4)),
        "AdmitFrequentSketch": td.Policy(admission=td.AdmitFrequentSketch(2, "1KB", 10)),
        "AdmitNone": td.Policy(admission=td.AdmitNone(), refused="zeros"),
        "scores": td.Policy(
            score=("frequency", "timestamp", "custom", "step"), capacity=20, ttl=500
        ),
    }


def modules() -> nn.ModuleDict:
    """Every module class; together they have every initializer, policy and dtype of rows."""
    torch.manual_seed(5)
    module = nn.ModuleDict(
        {
            "row": td.DynamicEmbedding(
                4,
                padding_idx=11,
                name="row",
                optimizer=td.RowWiseAdagrad(lr=0.25),
                policy=policies()["scores"],
                eval_default=torch.full((4,), 0.125),
                output_dtype=torch.bfloat16,
                initializer=td.Normal(),
            ),
            "bag": td.DynamicEmbeddingBag(
                4,
                mode="mean",
                name="bag",
                optimizer=td.AdamW(lr=0.25),
                split=True,
                max_rows=1000,
                initializer=td.Normal(),
            ),
            "bags": td.DynamicEmbeddingBagCollection(
                [td.TableConfig(name, 4, initializer=i) for name, i in initializers().items()],
                optimizer=td.SGD(lr=0.25),
                max_rows=1000,
            ),
            "rows": td.DynamicEmbeddingCollection(
                [
                    td.TableConfig(
                        name,
                        4,
                        [f"{name} of {feature}" for feature in ("user", "item")],
                        policy=policy,
                        feature_policies={
                            f"{name} of item": td.FeaturePolicy(
                                threshold=1 if "Frequent" in name else None, updates_scores=False
                            )
                        },
                        initializer=td.Normal(),
                    )
                    for name, policy in policies().items()
                    if name != "scores"
                ],
                optimizer=td.Adam(lr=0.25),
                max_rows=1000,
            ),
            "dtypes": td.DynamicEmbeddingBagCollection(
                [
                    td.TableConfig(
                        "half",
                        8,
                        ["a"],
                        dtype=torch.float16,
                        eval_default="zeros",
                        initializer=td.Normal(),
                    ),
                    td.TableConfig(
                        "brain", 4, ["b"], dtype=torch.bfloat16, initializer=td.Normal()
                    ),
                    td.TableConfig(
                        "part", 4, ["c"], shard=ColumnShard("whole", 12, 4), initializer=td.Normal()
                    ),
                ],
                mode="mean",
                optimizer=td.Adam(lr=0.25, state_dtype=torch.uint8, row_steps=True),
                max_rows=1000,
            ),
            "read": td.DynamicEmbedding(4, name="read", trainable=False, initializer=td.Normal()),
        }
    )
    table_modules(module)["row"].group.scores.set_batch(0, 5)
    return module


def optimized() -> nn.ModuleDict:
    """A small module with every optimizer."""
    torch.manual_seed(5)
    return nn.ModuleDict(
        {
            name: td.DynamicEmbedding(4, name="t", optimizer=c, initializer=td.Normal())
            for name, c in optimizers().items()
        }
    )


def train(module: nn.Module, steps: int = 1) -> None:
    """Steps of all table modules in a module, with ids that all of them know."""
    for _ in range(steps):
        for part in table_modules(module).values():
            if part.trainable:
                output = looked_up(part, IDS)
                torch.stack([out.float().square().sum() for out in output]).sum().backward()
                part.optimizer.step(
                    now=NOW + part.group.steps if part.group.config.keeps_time else None
                )


def table_modules(module: nn.Module) -> dict[str, Any]:
    """The modules that have tables, by their paths."""
    return {name: part for name, part in module.named_modules() if hasattr(part, "group")}


def looked_up(part: Any, ids: Tensor) -> list[Tensor]:
    """The outputs of a module, live or frozen, for ids."""
    names = getattr(part, "feature_names", None)
    if names is None:
        output = part(ids[:, None] if "Bag" in type(part).__name__ else ids)
    else:
        output = part(dict.fromkeys(names, ids[:, None]))
    return list(output.values()) if isinstance(output, dict) else [output]


def group_numbers(group: td.TableGroup) -> Numbers:
    """What a group keeps of its ids, by table."""
    numbers: Numbers = {}
    for table, name in enumerate(group.names):
        content = read_content(group.tables, table)
        of = {"ids": content.ids, "rows": content.rows, "scores": score_words(content)}
        of |= content.state
        counts = read_counts(group.tables, table)
        if counts is not None:
            of |= {"counted": counts.ids, "counts": counts.counts}
        numbers |= {f"{name}: {key}": value for key, value in of.items()}
    return {**numbers, "steps": torch.tensor(group.steps)}


def numbers_of(module: nn.Module) -> Numbers:
    """What the tables of a module hold, and what it gives for ids, some of which it does not know.

    It is in eval mode afterwards.
    """
    module.eval()
    numbers: Numbers = {}
    for path, part in table_modules(module).items():
        of = group_numbers(part.group)
        with torch.no_grad():
            of |= {
                f"output {i}": o
                for i, o in enumerate(looked_up(part, torch.cat([IDS, IDS[:2] + 100])))
            }
        numbers |= {f"{path} {key}": value for key, value in of.items()}
    return numbers


def frozen_numbers(module: nn.Module) -> Numbers:
    """The outputs of frozen modules for ids."""
    ids = torch.cat([IDS, IDS[:2] + 100])
    return {
        f"{path} {i}": output
        for path, part in module.named_modules()
        if hasattr(part, "frozen_tables")
        for i, output in enumerate(looked_up(part, ids))
    }


def evicting() -> td.TableGroup:
    """A group that has evicted ids."""
    torch.manual_seed(5)
    group = td.TableGroup(
        [
            td.TableConfig(
                "t",
                4,
                policy=td.Policy(capacity=4, score=("frequency", "step")),
                initializer=td.Normal(),
            )
        ],
        optimizer=td.Adam(lr=0.25),
        max_rows=100,
    )
    group.evicted.record(10, rows=True)
    for number in IDS.tolist():
        group.insert(0, torch.tensor([number]))
        group.step()
    return group


def values() -> dict[str, Any]:
    """Instances of the classes that are not modules."""
    group = evicting()
    return {
        "optimizers": optimizers(),
        "initializers": initializers(),
        "policies": policies(),
        "feature policy": td.FeaturePolicy(threshold=3, ttl=50, updates_scores=False),
        "table": td.TableConfig(
            "t", 4, ["f"], padding_idx=3, dtype=torch.float16, initializer=td.Normal()
        ),
        "group": group,
        "stats": group.usage.tables()["t"],
        "evicted": group.evicted.take()["t"],
        "new": td.NewIds(IDS, IDS > 5, torch.tensor([2]), "t"),
        "jagged": td.KeyedJagged(["a", "b"], IDS, torch.tensor([0, 2, 6]), IDS.float()),
        "exported": list(group.export(0)),
        "scored": group.scores.get(0, IDS),
        "found": group.find(IDS, torch.tensor([0, len(IDS)]), [0]),
        "storage": td.HostStore(hbm="1GB", host="2GB"),
        "score": td.Custom(combine="decayed_sum", half_life="7d"),
    }


# -- RecIS -------------------------------------------------------------------------------------


def recis_initializers() -> dict[str, td.Initializer]:
    """An initializer of every kind by the name of its class."""
    kinds: list[td.Initializer] = [
        recis.ConstantInitializer(0.5),
        recis.KaimingNormalInitializer(mode="fan_out"),
        recis.KaimingUniformInitializer(0.5),
        recis.NormalInitializer(0.5, 0.25),
        recis.TruncNormalInitializer(0.0, 1.0),
        recis.UniformInitializer(-0.5, 0.25),
        recis.XavierNormalInitializer(0.5),
        recis.XavierUniformInitializer(0.5),
    ]
    return {type(kind).__name__: kind for kind in kinds}


def recis_options() -> dict[str, recis.EmbeddingOption]:
    """Options of tables with hooks and initializers; by feature."""

    def option(name: str, **arguments: Any) -> recis.EmbeddingOption:
        return recis.EmbeddingOption(
            embedding_dim=4, block_size=5, shared_name=name, max_rows=1000, **arguments
        )

    clock = recis.FilterHook("GlobalStepFilter", {"filter_step": 9, "filter_interval": 2})
    uniform = recis.UniformInitializer(-0.5, 0.5)
    return {
        "clicked": option("item", combiner="mean", filter_hook=clock, initializer=uniform),
        "shown": option("item", filter_hook=clock, initializer=uniform),
        "user": option(
            "user",
            admit_hook=recis.AdmitHook("Frequency", {"threshold": 2}),
            combiner="tile",
            combiner_kwargs={"tile_len": 2},
            initializer=td.Constant(0.5),
        ),
        "tag": option("tag", dtype=torch.bfloat16, admit_hook=recis.AdmitHook("ReadOnly")),
    }


def recis_model() -> nn.ModuleDict:
    """An engine, an embedding, a table and a feature engine with all ops."""
    torch.manual_seed(5)
    return nn.ModuleDict(
        {
            "features": feature_engine(),
            "engine": recis.EmbeddingEngine(recis_options()),
            "one": recis.DynamicEmbedding(recis.EmbeddingOption(4, 5, shared_name="one")),
            "table": recis.HashTable([4], name="table", max_rows=100),
        }
    )


def feature_engine() -> recis.FeatureEngine:
    """An engine with every op."""

    def feature(name: str, *chain: recis.FeatureOp) -> recis.Feature:
        made = recis.Feature(name)
        for op in chain:
            made.add_op(op)
        return made

    fields = recis.SelectFields([recis.SelectField("ids"), recis.SelectField("others")])
    return recis.FeatureEngine(
        [
            feature("mod", recis.SelectField("ids"), recis.Mod(7)),
            feature("bucket", recis.SelectField("price"), recis.Bucketize([1.0, 10.0])),
            feature("cross", fields, recis.FeatureCross()),
            feature("hash", recis.SelectField("text"), recis.Hash("farm")),
            feature("hashes", recis.SelectField("ids"), recis.IDMultiHash([10, 20])),
            feature("cut", recis.SelectField("ids"), recis.SequenceTruncate(2, False)),
        ]
    )


def recis_batch() -> dict[str, Any]:
    """What the feature engine takes."""
    ids = recis.RaggedTensor(IDS, torch.tensor([0, 3, 4, 6]))
    return {
        "ids": ids,
        "others": ids.with_values(IDS + 1),
        "price": torch.tensor([0.5, 9.0, 10.0]),
        "text": recis.RaggedTensor(
            torch.tensor(list(b"torchdynemb"), dtype=torch.uint8), torch.tensor([0, 5, 11])
        ),
    }


def recis_optimizer(model: nn.Module) -> recis.SparseAdam:
    return recis.SparseAdam(recis.filter_out_sparse_param(model), lr=0.25, weight_decay=0.5)


def train_recis(model: Any, optimizer: recis.SparseAdam, steps: int = 1) -> None:
    """Steps of all tables."""
    for _ in range(steps):
        ids = IDS[:, None]
        outputs = model["engine"](dict.fromkeys(recis_options(), ids))
        outputs |= {"one": model["one"](ids), "table": model["table"](IDS)}
        torch.stack([output.square().sum() for output in outputs.values()]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def recis_numbers(model: Any) -> Numbers:
    """What the tables hold and what is looked up; the model is in eval mode afterwards."""
    model.eval()
    numbers: Numbers = {}
    for name, table in recis.filter_out_sparse_param(model).items():
        numbers |= {f"{name} {key}": value for key, value in group_numbers(table.group).items()}
    with torch.no_grad():
        outputs = model["engine"](dict.fromkeys(recis_options(), IDS[:, None]))
    numbers |= {f"output {name}": output for name, output in outputs.items()}
    for name, value in model["features"](recis_batch(), remain_no_use_data=False).items():
        numbers[f"feature {name}"] = value if isinstance(value, Tensor) else value.values()
    return numbers


def recis_values() -> dict[str, Any]:
    """Instances of the classes that are not modules."""
    table = recis.HashTable([4], name="t", max_rows=100)
    table(IDS).sum().backward()
    fused = {
        recis.FusedBoundaryOP: recis.Bucketize([1.0]),
        recis.FusedCutoffOP: recis.SequenceTruncate(2, False),
        recis.FusedHashOP: recis.Hash("murmur"),
        recis.FusedModOP: recis.Mod(7),
        recis.FusedMultiHashOP: recis.IDMultiHash([10]),
        recis.FusedStringMultiHashOP: recis.StringMultiHash([10]),
    }
    embedding = recis.DynamicEmbedding(recis.EmbeddingOption(4, 5, shared_name="e"))
    return {
        "options": recis_options(),
        "initializers": recis_initializers(),
        "fused": {made.__name__: made([op]) for made, op in fused.items()},
        "feature": recis.Feature("f").add_op(recis.SelectField("ids", torch.int64)),
        "ragged": recis.RaggedTensor(IDS, [torch.tensor([0, 2, 6])], IDS.float()),
        "slice": recis.gen_slice(1, 3, 8),
        "mask": recis.Mask([0, -1], torch.int64),
        "apart": recis.NoReduceEmbedding(torch.ones(1, 4), IDS * 0, torch.tensor([0, 6])),
        "ids map": table.ids_map(),
        "children": table.children_info(),
        "gradients": table.grad(),
        "error": recis.SequenceLengthError("a row is longer"),
        "filter": GlobalStepFilter(3),
        "prepared": embedding.exchange_ids(IDS[:, None]),
    }


# -- how it is saved ---------------------------------------------------------------------------


class Recorder(pickle.Unpickler):
    """An unpickler that keeps which classes and functions of torch_dynemb a file names."""

    found: set[tuple[str, str]] = set()  # noqa: RUF012 - of all: torch.load makes its own

    def find_class(self, module: str, name: str, /) -> Any:
        if module.partition(".")[0] == "torch_dynemb":
            self.found.add((module, name))
        return super().find_class(module, name)


def keep(thing: Any, name: str) -> None:
    """Writes a file: with ``pickle`` or, where its name ends so, ``torch.save``."""
    file = io.BytesIO()
    if name.endswith(".pickle.gz"):
        pickle.dump(thing, file)
    else:
        torch.save(thing, file)
    (SAVED / name).write_bytes(gzip.compress(file.getvalue(), mtime=0))


def kept(name: str, *, weights_only: bool = False) -> Any:
    """What :func:`keep` has written."""
    return recorded(name, weights_only=weights_only)[0]


def recorded(name: str, *, weights_only: bool = False) -> tuple[Any, set[tuple[str, str]]]:
    """What :func:`keep` has written, and (module, name) of what it names in torch_dynemb."""
    Recorder.found = set()
    file = io.BytesIO(gzip.decompress((SAVED / name).read_bytes()))
    if name.endswith(".pickle.gz"):
        return Recorder(file).load(), Recorder.found
    if weights_only:
        return torch.load(file, weights_only=True), set()
    recording: Any = SimpleNamespace(Unpickler=Recorder, load=pickle.load, __name__="recording")
    return torch.load(file, weights_only=False, pickle_module=recording), Recorder.found


def batches() -> dict[str, Any]:
    """Inputs of classes that may be loaded with ``weights_only``."""
    return {
        "jagged": td.KeyedJagged(["a", "b"], IDS, torch.tensor([0, 2, 6]), IDS.float()),
        "ragged": recis.RaggedTensor(IDS, [torch.tensor([0, 2, 6])], IDS.float()),
    }


def program_inputs() -> dict[str, tuple[Any, ...]]:
    """By program: what it takes."""
    offsets = torch.tensor([0, 2, 4, 5, 6])
    return {
        "bags.pt2": (td.KeyedJagged(["user", "item"], IDS, offsets),),
        "features.pt2": (recis_batch()["ids"],),
    }


def programs() -> dict[str, nn.Module]:
    """By program: the module that is exported."""
    torch.manual_seed(5)
    bags = td.DynamicEmbeddingBagCollection(
        [
            td.TableConfig("user", 4, initializer=td.Normal()),
            td.TableConfig("item", 8, initializer=td.Normal()),
        ],
        optimizer=td.SGD(lr=0.25),
    )
    bags(*program_inputs()["bags.pt2"]).sum().backward()
    return {"bags.pt2": td.freeze(bags), "features.pt2": recis.Mod(7)}


def program_numbers(outputs: Mapping[str, Any]) -> Numbers:
    """Tensors of the outputs of programs."""
    return {
        "bags.pt2": outputs["bags.pt2"],
        "features.pt2": outputs["features.pt2"].values(),
    }


def without_paths(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Takes out of a program where on this machine its code lay."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes:
            node.meta.pop("stack_trace", None)
    return program


def write() -> None:
    """Writes all files."""
    numbers: Numbers = {}

    def add(file: str, of: Numbers) -> None:
        numbers.update({f"{file}: {name}": value.clone() for name, value in of.items()})

    model, small = modules(), optimized()
    train(model, 2)
    train(small, 2)
    keep(model, "modules.pt.gz")
    keep(small, "optimized.pt.gz")
    trained = {name: part for name, part in table_modules(model).items() if part.trainable}
    states = {
        "model": dict(model.state_dict()),
        "optimizers": {name: part.optimizer.state_dict() for name, part in trained.items()},
    }
    keep(states, "states.pt.gz")
    frozen = td.freeze(model)
    keep(frozen, "frozen.pickle.gz")
    add("frozen", frozen_numbers(frozen))
    add("modules", numbers_of(model))
    add("optimized", numbers_of(small))

    held = values()
    keep(held, "values.pt.gz")
    add("group", group_numbers(held["group"]))

    model = recis_model()
    optimizer = recis_optimizer(model)
    train_recis(model, optimizer, 2)
    keep(model, "recis.pt.gz")
    recis_state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    keep(recis_state, "recis_state.pt.gz")
    add("recis", recis_numbers(model))
    keep(recis_values(), "recis_values.pickle.gz")
    keep(batches(), "batches.pt.gz")

    outputs = {}
    for name, module in programs().items():
        program = torch.export.export(module, program_inputs()[name])
        torch.export.save(without_paths(program), SAVED / name)
        outputs[name] = module(*program_inputs()[name])
    add("programs", program_numbers(outputs))
    keep(numbers, "numbers.pt.gz")


if __name__ == "__main__":
    write()
