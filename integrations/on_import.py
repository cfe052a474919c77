"""Imports an integration once a program imports its framework, or now if it has; imports no framework itself."""

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

    If the integration cannot be imported, say because the framework is too old, neither import fails. Importing the
    integration by its name then raises the error.
    """
    if framework in sys.modules:
        _integrate(integration)
    else:
        sys.meta_path.insert(0, _Awaited(framework, integration))


class _Awaited(MetaPathFinder):
    """An import finder that finds no module, and removes itself when the framework is imported."""

    def __init__(self, framework: str, integration: str) -> None:
        self._framework, self._integration = framework, integration

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the other finders return; its loader imports the integration after the framework."""
        if fullname != self._framework:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is None or not hasattr(loader, "__dict__"):
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # restores the loader
            execute(module)
            _integrate(self._integration)

        loader.exec_module = exec_module
        return spec


def _integrate(integration: str) -> None:
    try:
        import_module(integration)
    except ImportError:  # the framework lacks something that is needed here
        return
    except Exception as error:
        warnings.warn(f"fusible: {integration} cannot be used: {error!r}", stacklevel=3)
