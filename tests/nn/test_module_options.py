"""Options of modules and groups: declared once, shown by name, refused where unknown."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from torch import nn
from typing_extensions import TypedDict, Unpack

import torch_dynemb as td
from torch_dynemb.keyword_options import FieldOf, declared_options, options_for, takes_options

pytestmark = pytest.mark.cpu_only("signatures, and tables with storage")

SGD = td.SGD(lr=0.1)
TABLES = [td.TableConfig("a", 4)]
GROUP = {"max_rows": None, "memory_budget": None, "split": False, "device": None}
MODULE = {
    **GROUP,
    "optimizer": None,
    "trainable": True,
    "output_dtype": torch.float32,
    "process_group": None,
}
SINGLE_TABLE = {
    **MODULE,
    **dict.fromkeys(("name", "padding_idx", "initializer", "storage")),
    "policy": td.Policy(),
    "eval_default": "initial",
    "dtype": torch.float32,
}
OF_STATIC = {"weight": inspect.Parameter.empty, "ids": None, **SINGLE_TABLE}
TAKEN: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (td.DynamicEmbedding, {"embedding_dim": inspect.Parameter.empty, **SINGLE_TABLE}),
    (
        td.DynamicEmbeddingBag,
        {
            "embedding_dim": inspect.Parameter.empty,
            "mode": "mean",
            "include_last_offset": False,
            **SINGLE_TABLE,
        },
    ),
    (td.DynamicEmbedding.from_embedding, OF_STATIC),
    (
        td.DynamicEmbeddingBag.from_embedding,
        {**OF_STATIC, "mode": None, "include_last_offset": None},
    ),
    (td.DynamicEmbeddingCollection, {"tables": inspect.Parameter.empty, **MODULE}),
    (
        td.DynamicEmbeddingBagCollection,
        {"tables": inspect.Parameter.empty, "mode": "sum", **MODULE},
    ),
    (
        td.TableGroup,
        {**dict.fromkeys(("tables", "optimizer"), inspect.Parameter.empty), "seed": None, **GROUP},
    ),
]


@pytest.mark.parametrize(("call", "defaults"), TAKEN)
def test_signatures_show_options_with_defaults(
    call: Callable[..., Any], defaults: dict[str, Any]
) -> None:
    parameters = inspect.signature(call).parameters
    shown_defaults = {name: repr(shown.default) for name, shown in parameters.items()}
    assert shown_defaults == {name: repr(default) for name, default in defaults.items()}
    by_position = {"embedding_dim", "weight", "ids", "tables"}
    for name, shown in parameters.items():
        assert (shown.kind is shown.KEYWORD_ONLY) == (name not in by_position)
        assert shown.annotation is not shown.empty


def test_help_documents_options() -> None:
    text = pydoc.render_doc(td.DynamicEmbedding, renderer=pydoc.plaintext)
    assert "memory_budget: int | str | None = None" in text
    assert "memory_budget: bytes that the tables may take together" in text
    assert "padding_idx: an id that reads as zeros" in text  # TableConfig's text
    own = inspect.getdoc(td.DynamicEmbedding.from_embedding) or ""
    assert own.count("    device: ") == 1
    assert "    device: of the rows; default: that of ``weight``" in own
    assert own.index("\n    max_rows: ") < own.index("\nRaises:\n")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda **given: td.DynamicEmbedding(4, **given),
            r"DynamicEmbedding.__init__\(\) got an unexpected keyword argument",
        ),
        (
            lambda **given: td.DynamicEmbeddingBagCollection(TABLES, **given),
            r"DynamicEmbeddingBagCollection.__init__\(\) got an unexpected keyword argument",
        ),
        (
            lambda **given: td.DynamicEmbedding.from_embedding(torch.ones(2, 4), **given),
            r"DynamicEmbedding.from_embedding\(\) got an unexpected keyword argument",
        ),
        (
            lambda **given: td.TableGroup(TABLES, optimizer=SGD, **given),
            r"TableGroup.__init__\(\) got an unexpected keyword argument",
        ),
        (
            lambda **given: td.TableGroup(TABLES, optimizer=SGD).remove(0, **given),
            r"TableGroup.remove\(\) got an unexpected keyword argument",
        ),
    ],
)
def test_unknown_names_are_refused_as_by_python(call: Callable[..., Any], message: str) -> None:
    with pytest.raises(TypeError, match=message + " 'colour'$"):
        call(colour=1)
    near = "score_belo" if "remove" in message else "max_row"
    with pytest.raises(TypeError, match=f"{message} '{near}'. Did you mean '{near}[ws]'\\?$"):
        call(**{near: 1})


class Size(TypedDict, total=False):
    """How large.

    Attributes:
        width: columns, at least 1,
            and more.
        dtype: as in the config.
    """

    width: Annotated[int, 3]
    dtype: Annotated[torch.dtype, FieldOf(td.TableConfig)]


class SizeAndName(Size, total=False):
    """How large, and what it is called.

    Attributes:
        name: of it.
    """

    name: Annotated[str | None, None]


def test_options_have_type_default_and_text() -> None:
    options = declared_options(SizeAndName)
    assert list(options) == ["width", "dtype", "name"]
    assert options["width"] == (int, 3, "columns, at least 1,\n        and more.")
    assert options["name"] == (str | None, None, "of it.")
    kind, default, text = options["dtype"]
    assert (kind, default) == (torch.dtype, torch.float32)
    assert text.startswith("of the rows: float32, bfloat16 or float16.")
    assert options_for(Size, {"width": 1, "name": "x"}) == {"width": 1}


def test_a_function_gets_each_option() -> None:
    @takes_options
    def sized(first: int, *, name: str = "n", **options: Unpack[Size]) -> Any:
        """Return what is given.

        Args:
            first: any.
            width: in another way.

        Returns:
            All.
        """
        return first, name, dict(options)

    assert sized(1, width=5) == (1, "n", {"width": 5, "dtype": torch.float32})
    assert str(inspect.signature(sized)) == (
        "(first: 'int', *, name: 'str' = 'n', width: int = 3, "
        "dtype: torch.dtype = torch.float32) -> 'Any'"
    )
    text = sized.__doc__ or ""
    assert text.startswith("Return what is given.\n\nArgs:\n    first: any.\n    width: in another")
    assert "    dtype: of the rows" in text
    assert text.endswith("\n\nReturns:\n    All.\n")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'first'"):
        sized()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes 1 positional argument but 2"):
        sized(1, 2)  # type: ignore[misc]


def test_an_option_without_a_default_is_refused() -> None:
    class NoDefault(TypedDict, total=False):
        width: int

    with pytest.raises(AssertionError, match="NoDefault: width has no default"):
        declared_options(NoDefault)


@pytest.mark.parametrize("kind", [td.DynamicEmbedding, td.DynamicEmbeddingBag])
def test_from_embedding_takes_all_options(kind: Any, tmp_path: Path) -> None:
    weight = torch.arange(24.0).reshape(6, 4)
    module = kind.from_embedding(
        weight, optimizer=SGD, padding_idx=2, storage=td.SSDStore(tmp_path), max_rows=100
    )
    assert (len(module), module.group.config.max_rows) == (5, 100)
    ids = torch.tensor([[0], [2], [5]])
    expected = weight[ids[:, 0]] * (ids != 2)
    assert torch.equal(module.eval()(ids).reshape(3, 4), expected)
    assert module.table.storage == td.SSDStore(tmp_path)


def test_from_embedding_takes_rows_to_another_device() -> None:
    with torch.device("meta"):  # of the module, where no device is given
        static = nn.Embedding(3, 4, device="cpu")
        assert td.DynamicEmbedding.from_embedding(static, optimizer=SGD).group.device.type == "cpu"
    with pytest.raises(RuntimeError, match="device is meta"):
        td.DynamicEmbedding.from_embedding(static, optimizer=SGD, device="meta")
