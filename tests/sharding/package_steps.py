"""What the fresh processes of test_dynamicemb_package do."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import types

PACKAGE = "torch_dynemb.compat.dynamicemb"


def error_of(statement: str) -> str:
    """Class and text of the error of a statement; empty without one."""
    try:
        exec(statement, {})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def imported(rank: int) -> None:
    """What takes long, before a test begins."""
    importlib.import_module(PACKAGE)


def before_registration(rank: int) -> list[str]:
    """What imports say before the package is registered."""
    return [
        error_of("import dynamicemb"),
        error_of(f"import {PACKAGE}.inference"),
        error_of(f"from {PACKAGE}.key_value_table import Storage"),
    ]


def beside_another(rank: int, name: str) -> tuple[str, list[str]]:
    """The error where another module of this name is imported, and what is registered then."""
    from torch_dynemb.compat.dynamicemb import register_as_dynamicemb

    other = types.ModuleType(name)
    other.__file__ = "/site-packages/other.py"
    sys.modules[name] = other
    try:
        register_as_dynamicemb()
    except ImportError as error:
        text = str(error)
    else:
        text = ""
    del sys.modules[name]
    return text, [found for found in sys.modules if found.partition(".")[0] == "dynamicemb"]


def registered(rank: int) -> dict[str, bool]:
    """Which modules are the same under both names, after two registrations."""
    from torch_dynemb.compat.dynamicemb import register_as_dynamicemb

    register_as_dynamicemb()
    finders = len(sys.meta_path)
    register_as_dynamicemb()
    package = importlib.import_module(PACKAGE)
    names = [found.name for found in pkgutil.iter_modules(package.__path__)]
    same = {
        name: importlib.import_module(f"dynamicemb.{name}")
        is importlib.import_module(f"{PACKAGE}.{name}")
        is getattr(package, name)
        for name in names
    }
    scope: dict[str, object] = {}
    exec("import dynamicemb.planner as planner, dynamicemb", scope)
    same["as"] = scope["planner"] is package.planner
    same["package"] = scope["dynamicemb"] is package
    same["found"] = importlib.util.find_spec("dynamicemb") is not None
    same["once"] = len(sys.meta_path) == finders
    return same


def after_registration(rank: int) -> list[str]:
    """What imports of modules and names that are not offered say."""
    return [
        error_of("import dynamicemb.batched_dynamicemb_tables"),
        error_of("from dynamicemb.inference import apply_dynamicemb_preprocessing"),
        error_of("import dynamicemb_extensions"),
        error_of("from dynamicemb import UniqueOp"),
        error_of("import dynamicemb; dynamicemb.UniqueOp"),
        error_of("from dynamicemb.incremental_dump import replay_increment"),
        error_of("from dynamicemb import nothing_of_the_kind"),
        error_of("import dynamicemb.nothing_of_the_kind"),
        error_of("from dynamicemb import *"),
    ]
