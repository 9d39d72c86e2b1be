"""Registration of the package as ``dynamicemb``."""

from __future__ import annotations

import importlib
import pkgutil
import sys

from torch_dynemb.compat.dynamicemb.not_offered import MissingModules

_PACKAGE = __name__.rpartition(".")[0]
_NAME = "dynamicemb"


def register_as_dynamicemb() -> None:
    """Have ``import dynamicemb`` import this package, in this process.

    Call it before the first import of ``dynamicemb``. Its modules, such as ``dynamicemb.planner``,
    are registered, too. An installed DynamicEmb is not imported then. Further calls do nothing.

    Raises:
        ImportError: another ``dynamicemb`` has been imported.

    Example::

        from torch_dynemb.compat.dynamicemb import register_as_dynamicemb

        register_as_dynamicemb()
        from dynamicemb.planner import DynamicEmbeddingShardingPlanner
    """
    package = sys.modules[_PACKAGE]
    modules = {_NAME: package}
    for found in pkgutil.iter_modules(package.__path__):
        modules[f"{_NAME}.{found.name}"] = importlib.import_module(f"{_PACKAGE}.{found.name}")
    for name, loaded in list(sys.modules.items()):
        if name.partition(".")[0] == _NAME and modules.get(name) is not loaded:
            raise ImportError(
                f"register_as_dynamicemb: {name} has been imported from "
                f"{getattr(loaded, '__file__', None)}: call register_as_dynamicemb() before the "
                "first import of dynamicemb",
                name=name,
            )
    sys.modules.update(modules)
    _refuse_missing_modules(_NAME)


def _refuse_missing_modules(package: str) -> None:
    """Have imports of modules that are not offered say what to use instead.

    Args:
        package: name under which programs import the package.
    """
    if not any(
        isinstance(finder, MissingModules) and finder.package == package for finder in sys.meta_path
    ):
        sys.meta_path.append(MissingModules(package))


_refuse_missing_modules(_PACKAGE)

__all__ = ["register_as_dynamicemb"]
