"""Inputs and outputs of a compiled model. Inputs are checked before it runs: compiled code checks
nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from torch_dynemb.argument_checks import described

_CONSTANTS = (bool, int, float, str)
# torch compiles for sizes from 2 on, and that code also serves 0 and 1
_LEAST_CHECKED = 2
_IS_ON = {"cpu": attrgetter("is_cpu"), "cuda": attrgetter("is_cuda")}


class Size(NamedTuple):
    """The size of a dimension.

    Attributes:
        symbol: dynamic size that it depends on, by the name of its ``torch.export.Dim``, such as
            ``batch``, or else by its place, such as ``ids.shape[0]``; None: the size is ``plus``.
        times, plus: the size is ``times * symbol + plus``.
        least, most: bounds of the symbol; None: unbounded.
    """

    symbol: str | None
    times: int
    plus: int
    least: int
    most: int | None


class Input(NamedTuple):
    """A leaf of the inputs, or a tensor of the outputs.

    Attributes:
        name: of an input in the exported program. Of an output its path, such as ``score`` or
            ``output_1_score``, or ``output`` if it is the only one.
        dtype: of the tensor; None: not a tensor, but ``value``.
        sizes: of the tensor's dimensions; None: any size, because it is another function of sizes.
        value: value of a leaf that is not a tensor.
    """

    name: str
    dtype: torch.dtype | None
    sizes: list[Size | None]
    value: bool | int | float | str | None


def inputs_of(program: torch.export.ExportedProgram, names: Mapping[str, str]) -> list[Input]:
    """Return the inputs of an exported program, leaf by leaf.

    Args:
        program: the program.
        names: of its symbols.

    Raises:
        ValueError: an input is neither a tensor nor a constant.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    result = []
    for spec in program.graph_signature.input_specs:
        if spec.kind != InputKind.USER_INPUT:
            continue
        name = spec.arg.name
        value = nodes[name].meta.get("val")
        if isinstance(value, Tensor):
            sizes = [_size_of(size, program, names) for size in value.shape]
            result.append(Input(name, value.dtype, sizes, None))
        elif value is None or isinstance(value, _CONSTANTS):
            result.append(Input(name, None, [], value))
        else:
            raise ValueError(
                f"serving.export: the input {name!r} is {described(value)}, which changes from run "
                "to run: give it as a tensor, or leave it out of dynamic_shapes"
            )
    return result


def outputs_of(
    program: torch.export.ExportedProgram, names: Mapping[str, str], *, counted: bool
) -> list[Input]:
    """Return the tensors of the output of an exported program, from left to right.

    Args:
        program: the program.
        names: of its symbols.
        counted: whether the output is a pair of that of the model, and counts of missing ids, which
            are left out.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    specs = [of for of in program.graph_signature.output_specs if of.kind == OutputKind.USER_OUTPUT]
    tree = program.call_spec.out_spec
    paths = _paths(tree.child(0) if counted else tree)
    result = []
    for spec, path in zip(specs[:-1] if counted else specs, paths, strict=True):
        if isinstance(spec.arg, TensorArgument):
            value = nodes[spec.arg.name].meta["val"]
            sizes = [_size_of(size, program, names) for size in value.shape]
            result.append(Input(_output_name(path), value.dtype, sizes, None))
    if len({output.name for output in result}) < len(result):
        return [of._replace(name=f"output_{number}") for number, of in enumerate(result)]
    return result


def _paths(spec: Any) -> Iterator[tuple[object, ...]]:
    """Iterate over the paths of the leaves of an output: keys of dicts, and numbers."""
    if spec.is_leaf():
        yield ()
        return
    keys = spec.context if spec.type in (dict, OrderedDict) else range(spec.num_children)
    for key, child in zip(keys, spec.children(), strict=True):
        for path in _paths(child):
            yield (key, *path)


def _output_name(path: tuple[object, ...]) -> str:
    first = [] if path and isinstance(path[0], str) else ["output"]
    return "_".join(map(str, [*first, *path]))


def _size_of(
    size: int | torch.SymInt, program: torch.export.ExportedProgram, names: Mapping[str, str]
) -> Size | None:
    if isinstance(size, int):
        return Size(None, 0, size, size, size)
    expression = size.node.expr
    symbols = list(expression.free_symbols)
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    plus = expression.subs(symbol, 0)
    times = expression.subs(symbol, 1) - plus
    if not (plus.is_Integer and times.is_Integer) or expression != times * symbol + plus:
        return None
    bounds = program.range_constraints.get(symbol)
    least = int(bounds.lower) if bounds is not None else 0
    most = int(bounds.upper) if bounds is not None and bounds.upper.is_Integer else None
    return Size(
        names.get(str(symbol), str(symbol)),
        int(times),
        int(plus),
        least if least > _LEAST_CHECKED else 0,
        most if most is not None and most < 2**62 else None,
    )


def input_tensors(
    expected: Sequence[Input], leaves: Sequence[Any], device: torch.device
) -> list[Tensor]:
    """Return the tensors among leaves, checked and contiguous.

    Args:
        expected: expected type and shape of each leaf.
        leaves: as many.
        device: of the model.

    Raises:
        TypeError: a leaf has another type or dtype.
        ValueError: a tensor has another shape, or is on another device, or a constant has changed.
    """
    tensors = []
    symbols: dict[str, int] = {}
    for leaf, wanted in zip(leaves, expected, strict=True):
        if wanted.dtype is None:
            if type(leaf) is not type(wanted.value) or leaf != wanted.value:
                raise ValueError(
                    f"run: the input {wanted.name!r} is {described(leaf)}, but the model was "
                    f"exported with {wanted.value!r}, which is compiled in"
                )
            continue
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
            form = (
                ", as in the example of the export: export with a new KeyedJaggedTensor, because "
                "one that a model has read may have both lengths and offsets, and give each run a "
                "new one"
            )
            raise TypeError(
                f"run: the input {wanted.name!r} is {described(leaf)}, expected a dense tensor"
                + (form if leaf is None else "")
            )
        if leaf.dtype != wanted.dtype:
            raise TypeError(
                f"run: the input {wanted.name!r} has dtype {leaf.dtype}, expected {wanted.dtype}"
            )
        if leaf.device.type != device.type:
            raise ValueError(
                f"run: the input {wanted.name!r} is on {leaf.device}, but the package was compiled "
                f"for {device.type}: move the input"
            )
        if not _fits(leaf.shape, wanted.sizes, symbols):
            raise ValueError(
                f"run: the input {wanted.name!r} has shape {tuple(leaf.shape)}, expected "
                f"{shape_text(wanted.sizes)}"
                + "".join(f", where {name} is {size} by now" for name, size in symbols.items())
            )
        tensors.append(leaf if leaf.is_contiguous() else leaf.contiguous())
    return tensors


class InputChecks:
    """Input checks, run after run: :func:`input_tensors`, but briefer for shapes of the last run.

    All checks take longer than a lookup of few ids.

    Args:
        expected: expected type and shape of each leaf.
        device: of the model.
    """

    def __init__(self, expected: Sequence[Input], device: torch.device) -> None:
        self._expected, self._device = expected, device
        self._dtypes = [wanted.dtype for wanted in expected]
        self._accepted: list[torch.Size] = []  # replaced as a whole: threads share it

    def tensors(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Return what :func:`input_tensors` returns, or raise what it raises."""
        if self._repeats(leaves):
            return list(leaves)
        tensors = input_tensors(self._expected, leaves, self._device)
        self._accepted = [tensor.shape for tensor in tensors]
        return tensors

    def _repeats(self, leaves: Sequence[Any]) -> bool:
        """Return whether leaves are contiguous tensors in the accepted shapes."""
        shapes = self._accepted
        is_on_device = _IS_ON[self._device.type]  # device.type takes a microsecond
        if not len(shapes) == len(leaves) == len(self._dtypes):
            return False  # the first inputs, or there are constants
        for leaf, dtype, shape in zip(leaves, self._dtypes, shapes, strict=True):
            if not (
                type(leaf) is Tensor
                and leaf.dtype is dtype
                and leaf.shape == shape
                and leaf.layout is torch.strided
                and is_on_device(leaf)
                and leaf.is_contiguous()
            ):
                return False
        return True


def _fits(shape: Sequence[int], sizes: Sequence[Size | None], symbols: dict[str, int]) -> bool:
    """Return whether a shape is as expected; record the dynamic sizes that follow from it."""
    if len(shape) != len(sizes):
        return False
    for length, size in zip(shape, sizes, strict=True):
        if size is None:
            continue
        if size.symbol is None:
            if length != size.plus:
                return False
            continue
        value, rest = divmod(length - size.plus, size.times)
        known = symbols.setdefault(size.symbol, value)
        too_large = size.most is not None and value > size.most
        if rest != 0 or value != known or value < size.least or too_large:
            return False
    return True


def shape_text(sizes: Sequence[Size | None]) -> str:
    """Format a shape for messages, such as ``(B, 3)``."""
    return "(" + ", ".join(_size_text(size) for size in sizes) + ")"


def _size_text(size: Size | None) -> str:
    if size is None:
        return "any"
    if size.symbol is None:
        return str(size.plus)
    text = size.symbol if size.times == 1 else f"{size.times} * {size.symbol}"
    if size.plus:
        text += f" + {size.plus}" if size.plus > 0 else f" - {-size.plus}"
    if size.least > 0:
        text += f" [>= {size.least}]"
    if size.most is not None:
        text += f" [<= {size.most}]"
    return text


__all__ = ["Input", "InputChecks", "Size", "input_tensors", "inputs_of", "outputs_of", "shape_text"]
