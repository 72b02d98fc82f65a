"""Kernels are a leaf: they import torch, triton and each other."""

import ast

from tests.architecture.places import place, sources, tree

ALLOWED = ("torch", "triton", "lightning_longctx.kernels")
STANDARD = ("__future__", "collections.abc", "functools", "itertools", "typing")


def test_what_kernels_import():
    problems = []
    for path in sources("kernels"):
        for node in ast.walk(tree(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            allowed = (*ALLOWED, *STANDARD)
            problems += [
                f"{place(path, node)}: {name}"
                for name in names
                if not any(name == root or name.startswith(f"{root}.") for root in allowed)
            ]
    assert len(sources("kernels")) > 5 and not problems
