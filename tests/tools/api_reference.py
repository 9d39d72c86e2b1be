"""Writes the API reference from the docstrings: ``make docs``, or this program with a folder.

pdoc draws it: it imports the package and shows what ``__all__`` names, so ops of the compiled
library appear by their typed wrappers. Its warnings are errors here, and so is a reference such as
``:func:`torch_dynemb.freeze``` to a name that does not exist. Examples are not run here:
``tests/project/test_doctest.py`` runs all of them.
"""

from __future__ import annotations

import dataclasses
import html
import importlib
import inspect
import re
import sys
import typing
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from pdoc import render
from pdoc.doc import Module

DEFAULT = Path(__file__).resolve().parents[2] / "build" / "docs"
PACKAGES = (
    "torch_dynemb",
    "torch_dynemb.errors",
    "torch_dynemb.ops",
    "torch_dynemb.checkpoint",
    "torch_dynemb.storage.tiers",
    "torch_dynemb.table",
    "torch_dynemb.serving",
    "torch_dynemb.recis",
    "torch_dynemb.recis.functional",
    "torch_dynemb.torchrec",
    "torch_dynemb.oneembedding",
    "torch_dynemb.compat.dynamicemb",
    "torch_dynemb.migrate",
    "torch_dynemb.plan",
    "torch_dynemb.doctor",
)
_REFERENCE = re.compile(r":(?:class|func|meth|data|attr|mod):`~?\.?([\w.]+)`")


def classes(module: ModuleType) -> Iterator[type]:
    """Classes of the package that a module shows."""
    for name in getattr(module, "__all__", ()):
        thing = getattr(module, name)
        if inspect.isclass(thing) and thing.__module__.startswith("torch_dynemb"):
            yield thing


def resolve_annotations(cls: type) -> None:
    """Gives a dataclass's or named tuple's constructor types in place of their names.

    The names are those of the modules in which fields were declared, and a constructor knows only
    the module of its own class.
    """
    if not dataclasses.is_dataclass(cls) and not hasattr(cls, "_fields"):
        return
    hints = typing.get_type_hints(cls)
    constructor = cls.__init__ if dataclasses.is_dataclass(cls) else cls.__new__  # type: ignore[misc]
    named = getattr(constructor, "__annotations__", {})
    named.update({name: hints[name] for name in named if name in hints})


def missing_references(module: ModuleType) -> Iterator[str]:
    """References in docstrings of a module's names that lead nowhere."""
    for name in getattr(module, "__all__", ()):
        thing = getattr(module, name)
        members = [thing, *(vars(thing).values() if inspect.isclass(thing) else ())]
        for member in members:
            text = getattr(member, "__doc__", None)
            for reference in _REFERENCE.findall(text if isinstance(text, str) else ""):
                if reference.startswith("torch_dynemb.") and not exists(reference):
                    yield f"{module.__name__}.{name} refers to {reference}, which does not exist"


def exists(reference: str) -> bool:
    """Whether a dotted name can be reached."""
    parts = reference.split(".")
    thing: object = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        if hasattr(thing, part):
            thing = getattr(thing, part)
            continue
        try:
            thing = importlib.import_module(".".join(parts[:number]))
        except ImportError:
            return False
    return True


def index(modules: Sequence[Module]) -> str:
    """A page that leads to those of the packages, with the first line that each says of itself."""
    entries = "\n".join(
        f'<li><a href="{module.modulename}.html">{module.modulename}</a>: '
        f"{html.escape(module.docstring.partition(chr(10))[0])}</li>"
        for module in modules
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<title>torch_dynemb</title></head>\n"
        '<body style="font-family: sans-serif; max-width: 50em; margin: 3em auto">\n'
        f"<h1>torch_dynemb</h1>\n<ul>\n{entries}\n</ul>\n</body></html>\n"
    )


def build(folder: Path) -> None:
    """Writes the reference.

    Args:
        folder: gets ``index.html`` and a file for each package.

    Raises:
        UserWarning: pdoc cannot show something as it should.
        ValueError: a reference leads nowhere.
    """
    modules = [importlib.import_module(name) for name in PACKAGES]
    for module in modules:
        for cls in classes(module):
            resolve_annotations(cls)
    if wrong := [line for module in modules for line in missing_references(module)]:
        raise ValueError("\n".join(wrong))
    render.configure(docformat="google", search=True, show_source=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", category=UserWarning)
        # an option of a base: a TypedDict forgets its bases, so it is shown as the class's own
        warnings.filterwarnings("ignore", r"Cannot determine where torch_dynemb\.\w+Options\.")
        shown = {name: Module(importlib.import_module(name)) for name in PACKAGES}
        pages = {f"{name}.html": render.html_module(shown[name], shown) for name in PACKAGES}
        pages["index.html"] = index(list(shown.values()))
        pages["search.js"] = render.search_index(shown)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (folder / name).write_text(text)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    build(folder)
    print(f"{folder / 'index.html'}: {len(PACKAGES)} packages")


if __name__ == "__main__":
    main()
