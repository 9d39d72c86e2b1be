"""Rooms that are products of their own use public names of the rest, and few private modules."""

from __future__ import annotations

import ast
import importlib

import pytest
from test_documentation import PACKAGES
from test_imports import MODULES

pytestmark = pytest.mark.cpu_only("reads sources")

# The modules of each product by their first names, and how many modules of others it imports names
# from that are not in the reference. The numbers go down only.
PRODUCTS = {
    "oneembedding": (("oneembedding",), 23),
    "plan": (("plan",), 8),
    "recis": (("recis",), 25),
    "dynamicemb": (("compat", "torchrec.dynamicemb", "migrate.dynamicemb_"), 25),
}


def private_modules(parts: tuple[str, ...]) -> set[str]:
    """Modules outside of a product that it imports names from, other than public names."""
    found = set()
    for name, path in MODULES.items():
        if not name.startswith(parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            module = (
                (getattr(node, "module", None) or "") if isinstance(node, ast.ImportFrom) else ""
            )
            if not module.startswith("torch_dynemb"):
                continue
            for alias in node.names:
                inside = f"{module}.{alias.name}".partition(".")[2]
                source = inside if inside in MODULES else module.partition(".")[2]
                public = f"torch_dynemb.{source}" if source else "torch_dynemb"
                if source.startswith(parts) or (source == inside and public in PACKAGES):
                    continue
                if (
                    public not in PACKAGES
                    or alias.name not in importlib.import_module(public).__all__
                ):
                    found.add(source)
    return found


@pytest.mark.parametrize("product", PRODUCTS)
def test_products_import_few_private_modules(product: str) -> None:
    parts, most = PRODUCTS[product]
    found = private_modules(parts)
    assert len(found) <= most, sorted(found)
