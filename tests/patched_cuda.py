"""Processes in which torch says that CUDA is available, on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

# torch asks for CUDA when it is imported; only afterwards can the answer be replaced.
_SITE = """
import importlib.abc, importlib.util, sys

class AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.is_available = lambda: True

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, AfterImport())
"""


def patch_cuda(folder: Path) -> None:
    """Makes a folder; every Python that has it on its PYTHONPATH is patched when it starts."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITE)
