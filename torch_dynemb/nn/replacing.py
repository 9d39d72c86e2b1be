"""Dynamic tables in the place of a model's static ones."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from torch_dynemb.argument_checks import described
from torch_dynemb.initializers import Constant, Initializer, Normal, Uniform
from torch_dynemb.nn.bag import DynamicEmbeddingBag
from torch_dynemb.nn.embedding import DynamicEmbedding, StaticRows
from torch_dynemb.nn.options import SingleTableOptions
from torch_dynemb.nn.static_arguments import ARGUMENTS

Static = nn.Embedding | nn.EmbeddingBag
Dynamic = DynamicEmbedding | DynamicEmbeddingBag
# Number of values from which on the fourth moment decides between distributions.
_LEAST_VALUES = 64
# Between the kurtosis of a uniform distribution, 1.8, and that of a normal one, 3.
_KURTOSIS = 2.4


@dataclass(frozen=True)
class Replaced:
    """A static module that became a dynamic one.

    Attributes:
        paths: in the model; several where modules shared the weight.
        dim: columns of a row.
        rows: of the static table.
        taken: rows that the dynamic table has taken over.
        initializer: of rows to come, fitted to the weight.
    """

    paths: list[str]
    dim: int
    rows: int
    taken: int
    initializer: Initializer


@dataclass(frozen=True)
class ReplacementReport:
    """Result of :func:`replace_embeddings`; its text is a table.

    Attributes:
        replaced: what became dynamic, in the order of the model.
        left: path of each other module with an embedding's weight, and why it was left.
    """

    replaced: list[Replaced]
    left: dict[str, str]

    def __str__(self) -> str:
        lines = [
            f"{', '.join(one.paths)}: dim {one.dim}, {one.rows} static rows, "
            f"{one.taken} taken over, initializer {one.initializer}"
            for one in self.replaced
        ]
        return "\n".join([*lines, *(f"{path}: left, {why}" for path, why in self.left.items())])


class _Place(NamedTuple):
    """Place of a static module."""

    path: str
    parent: nn.Module
    attribute: str
    module: Static


def replace_embeddings(
    model: nn.Module,
    *,
    only: str | Iterable[str] | Callable[[str, nn.Module], bool] | None = None,
    ids: Literal["raw", "rows"] = "raw",
    **options: Unpack[SingleTableOptions],
) -> ReplacementReport:
    """Replace every ``nn.Embedding`` and ``nn.EmbeddingBag`` of a model by a dynamic table.

    Call it after the model has been initialized, or loaded, and before its optimizer is made. A
    table keeps dim, ``padding_idx``, ``mode`` and ``include_last_offset``, is trainable if the
    weight required grad, and lies on the weight's device. Its name is the path in the model.
    Modules that share a weight become one table. The padding id reads zeros. New ids begin with
    values like those of the weight: constant, uniform or normal, by its moments.

    Args:
        model: changes in place.
        only: paths of modules to replace, with ``*`` for any text, or a function of path and
            module; default: all.
        ids: ``"raw"``: ids are values of any kind, and the table begins empty. ``"rows"``: ids are
            row numbers of the static table, and all rows are taken over, such as trained ones.
        **options: of each table: ``optimizer``, such as ``td.Adam(lr=1e-3)``, and any other of
            :class:`torch_dynemb.SingleTableOptions` but ``name``, ``padding_idx`` and ``device``.

    Returns:
        What was replaced, with the initializers, and what was left and why.

    Raises:
        TypeError: ``model`` is not a module, or an argument has a wrong type.
        ValueError: a static table has ``max_norm``, ``scale_grad_by_freq``, ``sparse=True``,
            ``mode="max"``, hooks, or a weight on the meta device. Or another module uses its
            weight, as a tied output layer does. Or the model has nothing to replace, or is itself
            a static table. Or an option is wrong. The error names the module; nothing has changed.

    Example:
        >>> import torch, torch_dynemb as td
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 4), torch.nn.Linear(4, 1))
        >>> report = td.replace_embeddings(model, optimizer=td.Adam(lr=0.01))
        >>> model(torch.tensor([2**40, -1])).shape, len(model[0])
        (torch.Size([2, 1]), 2)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"replace_embeddings: model is {described(model)}, expected a torch.nn.Module"
        )
    if ids not in ("raw", "rows"):
        raise ValueError(f"replace_embeddings: ids is {ids!r}, expected 'raw' or 'rows'")
    for name in ("name", "padding_idx", "device"):
        if name in options:
            raise ValueError(
                f"replace_embeddings: {name} is {options[name]!r}, but each table gets its own"
                f"{_OWN[name]}: leave it out"
            )
    if isinstance(model, Static):
        raise ValueError(
            f"replace_embeddings: model is {type(model).__name__} itself, expected a module that "
            f"has some: make a dynamic one by Dynamic{type(model).__name__}.from_embedding(module)"
        )
    chosen, left = _choose(model, only)
    if not chosen:
        kinds = "nn.Embedding or nn.EmbeddingBag"
        found = f"; left: {left}" if left else ""
        raise ValueError(
            f"replace_embeddings: {type(model).__name__} has nothing to replace, expected a model "
            f"with {kinds}{'' if only is None else f' that only={only!r} chooses'}{found}"
        )
    shared = _by_weight(chosen)
    for places in shared:
        _check(model, places)
    made = [_dynamic(places, ids, options) for places in shared]
    for places, (module, _) in zip(shared, made, strict=True):
        for place in places:
            place.parent._modules[place.attribute] = module
    return ReplacementReport([replaced for _, replaced in made], left)


def _choose(
    model: nn.Module, only: str | Iterable[str] | Callable[[str, nn.Module], bool] | None
) -> tuple[list[_Place], dict[str, str]]:
    """Find the static modules to replace, and the others with the reason for each."""
    chooses = _chooser(only)
    chosen, left = [], {}
    for path, parent, attribute, module in _children(model):
        if not isinstance(module, Static):
            kind = type(module)
            quantized = kind.__module__.startswith("torch.ao.nn")
            if quantized and kind.__name__ in ("Embedding", "EmbeddingBag"):
                left[path] = f"a quantized {kind.__name__}"
            continue
        if not chooses(path, module):
            left[path] = "not among only"
        elif type(module) not in (nn.Embedding, nn.EmbeddingBag):
            left[path] = f"{type(module).__name__} may do more than the class it is made from"
        else:
            chosen.append(_Place(path, parent, attribute, module))
    return chosen, left


def _chooser(
    only: str | Iterable[str] | Callable[[str, nn.Module], bool] | None,
) -> Callable[[str, nn.Module], bool]:
    if only is None:
        return lambda path, module: True
    if callable(only):
        return only
    patterns = [only] if isinstance(only, str) else list(only)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"replace_embeddings: only has {described(pattern)}, expected paths")
    return lambda path, module: any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _children(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Give every attribute that is a module: path, parent, attribute, module; also shared ones."""
    parents = dict(model.named_modules())
    for prefix, parent in parents.items():
        for attribute, module in parent._modules.items():
            if module is not None:
                yield f"{prefix}.{attribute}" if prefix else attribute, parent, attribute, module


def _by_weight(places: list[_Place]) -> list[list[_Place]]:
    """Group places by their weight, in the order of the model."""
    groups: dict[int, list[_Place]] = {}
    for place in places:
        groups.setdefault(id(place.module.weight), []).append(place)
    return list(groups.values())


def _check(model: nn.Module, places: list[_Place]) -> None:
    """Raise ValueError, with the path, for what a dynamic table would do otherwise."""
    for path, *_, module in places:
        begin = f"replace_embeddings: {path} is {type(module).__name__}"
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            value = getattr(module, option)
            if value is not None and value is not False:
                raise ValueError(
                    f"{begin} with {option}={value}, which dynamic tables lack: "
                    f"{ARGUMENTS[option]}; set {path}.{option} to "
                    f"{None if option == 'max_norm' else False} to go on without, or choose "
                    "other modules with only="
                )
        if getattr(module, "mode", None) == "max":
            raise ValueError(f"{begin} with mode='max', expected 'sum' or 'mean'")
        if module.weight.is_meta:
            raise ValueError(
                f"{begin} with a weight on the meta device, expected values: initialize the model "
                "first"
            )
        if any(vars(module)[hooks] for hooks in _HOOKS):
            raise ValueError(
                f"{begin} with hooks, which the dynamic table would not have: remove them, and "
                "register them after the replacement"
            )
        first = places[0].module
        same = ("padding_idx", "mode", "include_last_offset")
        if type(first) is not type(module) or any(
            getattr(first, name, None) != getattr(module, name, None) for name in same
        ):
            raise ValueError(
                f"{begin} and shares its weight with {places[0].path}, but not class, "
                f"{', '.join(same)}: use one module for both"
            )
    weight, modules = places[0].module.weight, {id(place.module) for place in places}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter is weight and id(model.get_submodule(name.rpartition(".")[0])) not in modules:
            raise ValueError(
                f"replace_embeddings: {places[0].path} shares its weight with {name}, as a tied "
                "output layer does; a dynamic table has no weight to share: untie them, or leave "
                "the module out with only="
            )


# what each table gets by itself
_OWN = {
    "name": ", the path in the model",
    "padding_idx": ", that of the static module",
    "device": ", that of the weight",
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _dynamic(
    places: list[_Place],
    ids: Literal["raw", "rows"],
    options: SingleTableOptions,
) -> tuple[Dynamic, Replaced]:
    """Make the dynamic table of modules that share a weight."""
    static = places[0].module
    weight = static.weight.detach()
    keep = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
    if static.padding_idx is not None:
        keep[static.padding_idx] = False
    settings: SingleTableOptions = {
        "initializer": fitted_initializer(weight[keep]),
        "trainable": static.weight.requires_grad,
        **options,
        "name": places[0].path,
        "padding_idx": static.padding_idx,
        "device": weight.device,
    }
    dim = static.embedding_dim
    module: Dynamic
    if isinstance(static, nn.EmbeddingBag):
        module = DynamicEmbeddingBag(
            dim, mode=static.mode, include_last_offset=static.include_last_offset, **settings
        )
    else:
        module = DynamicEmbedding(dim, **settings)
    taken = 0
    if ids == "rows":
        taken = int(keep.sum())
        module._fill(
            StaticRows(weight, torch.arange(len(weight), device="cpu"), static.padding_idx)
        )
    module.train(static.training)
    paths = [place.path for place in places]
    return module, Replaced(paths, dim, len(weight), taken, module.table.initializer)


def fitted_initializer(weight: Tensor) -> Initializer:
    """Fit an initializer to values by their moments.

    Args:
        weight: float [n, dim]; trained or not.

    Returns:
        A constant where all are equal; else uniform if their kurtosis is nearer to that of a
        uniform distribution, else normal. Of few values: uniform within 1 / sqrt(dim) of 0.
    """
    values = weight.double().reshape(-1)
    if values.numel() == 0:
        bound = 1 / math.sqrt(weight.shape[1])
        return Uniform(-bound, bound)
    low, high = float(values.min()), float(values.max())
    if low == high:
        return Constant(low)
    mean, std = float(values.mean()), float(values.std(correction=0))
    kurtosis = float(((values - mean) / std).pow(4).mean())
    if values.numel() >= _LEAST_VALUES and kurtosis < _KURTOSIS:
        width = math.sqrt(3) * std
        return Uniform(mean - width, mean + width)
    return Normal(mean, std)


__all__ = ["Replaced", "ReplacementReport", "fitted_initializer", "replace_embeddings"]
