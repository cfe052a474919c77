"""Registers with a framework that is there already, or once a program imports it; imports no framework itself."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def after_import(framework: str, integration: str) -> None:
    """Imports ``integration`` now, if the module ``framework`` has been imported, else once it has been.

    An integration that cannot be imported there, say since the framework is too old, is left alone: neither import
    fails. Whoever imports it by its name gets the error.
    """
    if framework in sys.modules:
        _integrate(integration)
    else:
        sys.meta_path.insert(0, _Awaited(framework, integration))


class _Awaited(MetaPathFinder):
    """Finds nothing by itself, and goes away once it is asked for the framework."""

    def __init__(self, framework: str, integration: str) -> None:
        self._framework, self._integration = framework, integration

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """What the others find; its loader imports the integration when it is done."""
        if fullname != self._framework:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is None or not hasattr(loader, "__dict__"):
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader is what it was
            execute(module)
            _integrate(self._integration)

        loader.exec_module = exec_module
        return spec


def _integrate(integration: str) -> None:
    try:
        import_module(integration)
    except ImportError:  # a framework without what is needed here
        return
    except Exception as error:
        warnings.warn(f"fusible: {integration} cannot be used: {error!r}", stacklevel=3)
