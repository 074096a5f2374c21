"""Changes one expression of a module at a time and counts how many changes the module's own tests notice.

    python benchmarks/mutants.py --count 40 --seed 0 --json results/mutants.json

The changes are a random sample of all comparisons, arithmetic and boolean operators, numbers, and conditions of the
modules in TESTS. Each one is made in a copy of the checkout, in which the tests run.
"""

from __future__ import annotations

import ast
import copy
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.files import write_json
from benchmarks.common.program import ROOT, Parser

TESTS = {
    "indexing/store/store.py": ("tests/indexing/store/test_store.py", "tests/indexing/work"),
    "indexing/store/draft.py": ("tests/indexing/store/test_store.py", "tests/indexing/work"),
    "indexing/store/sealed_json.py": ("tests/indexing/store/test_store.py",),
    "indexing/work/work.py": ("tests/indexing/work",),
    "indexing/work/local_runner.py": ("tests/indexing/work",),
    "indexing/store/conflicts.py": ("tests/indexing/work",),
    "indexing/hit_sources/fusion.py": ("tests/indexing/hit_sources/test_fusion.py",),
    "indexing/measures/metrics.py": ("tests/indexing/measures/test_metrics.py",),
    "indexing/mining/pools.py": ("tests/indexing/mining/test_mining.py",),
    "indexing/mining/sampling.py": ("tests/indexing/mining/test_mining.py",),
    "retriever/objectives/contrastive.py": ("tests/retriever/objectives/test_losses.py",),
    "retriever/objectives/distillation.py": ("tests/retriever/objectives/test_distillation_losses.py",),
}
LIMIT_S = 120  # of a test run, five times its usual duration; a change that makes the tests hang counts as noticed
PAIRS: tuple[tuple[type[Any], type[Any]], ...] = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.BitAnd, ast.BitOr),
    (ast.And, ast.Or),
)
SWAPPED = {ast.FloorDiv: ast.Mult} | {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}


@dataclass
class Mutant:
    """A changed expression.

    Attributes:
        module: File of the module.
        line: Line of the expression.
        before: The original expression.
        after: The changed expression.
        noticed: Whether a test failed; None: not tried yet.
        seconds: Duration of the tests.
    """

    module: str
    line: int
    before: str
    after: str
    noticed: bool | None = None
    seconds: float = 0.0


def change(node: ast.AST) -> ast.AST | None:
    """Returns a changed copy of a node; None: the node is of a kind that is not changed."""
    changed: Any = copy.deepcopy(node)
    match node:
        case ast.Compare(ops=[operator, *_]) if type(operator) in SWAPPED:
            changed.ops[0] = SWAPPED[type(operator)]()
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPPED:
            changed.op = SWAPPED[type(operator)]()
        case ast.UnaryOp(op=ast.Not()):
            return node.operand
        case ast.IfExp():
            changed.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Constant(value=bool()):
            return ast.Constant(not node.value)
        case ast.Constant(value=int()):
            changed.value += 1
        case _:
            return None
    return ast.fix_missing_locations(changed)


def mutants_of(module: str, source: str) -> list[tuple[Mutant, str]]:
    """Returns the changes of a module, each with the module's new source."""
    mutants = []
    data, starts = source.encode(), [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    types = [getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")]
    annotations = {id(inner) for outer in types if outer is not None for inner in ast.walk(outer)}
    for node in ast.walk(tree):
        changed = None if id(node) in annotations else change(node)
        if changed is None or not isinstance(node, ast.expr):
            continue
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        text = f"({ast.unparse(changed)})"
        after = (data[:start] + text.encode() + data[end:]).decode()
        try:
            ast.parse(after)
        except SyntaxError:  # inside an f-string, whose parts have wrong positions in the syntax tree
            continue
        mutants.append((Mutant(module, node.lineno, data[start:end].decode()[:100], text[:100]), after))
    return mutants


def tests_pass(checkout: Path, module: str, source: str) -> bool:
    """Returns whether the tests of a module pass in a copy of the checkout with a changed source of the module."""
    path = checkout / module
    original = path.read_text()
    path.write_text(source)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not cluster"]
    command += TESTS[module]
    try:
        result = subprocess.run(command, cwd=checkout, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(original)
    return result.returncode == 0


def main() -> None:
    """Draws the changes, tries each, and prints whether a test notices it."""
    parser = Parser(__doc__)
    parser.add("--count", 40, "Number of changes.")
    parser.add("--seed", 0, "Seed of the draw.")
    parser.add("--json", None, "Write the results to this file, after each change.")
    options = parser.parse_args()
    all_mutants = [entry for module in TESTS for entry in mutants_of(module, (ROOT / module).read_text())]
    sample = random.Random(options.seed).sample(all_mutants, options.count)
    with tempfile.TemporaryDirectory(prefix="riptide-mutants-") as folder:
        checkout = Path(folder) / "checkout"
        files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in files.stdout.splitlines():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name)
        for module in TESTS:
            if not tests_pass(checkout, module, (ROOT / module).read_text()):
                sys.exit(f"{module}: its tests fail without a change")
        for mutant, source in sample:
            started = time.monotonic()
            mutant.noticed = not tests_pass(checkout, mutant.module, source)
            mutant.seconds = round(time.monotonic() - started, 1)
            verdict = "noticed" if mutant.noticed else "SURVIVED"
            print(f"{verdict}  {mutant.module}:{mutant.line}  {mutant.before} -> {mutant.after}", flush=True)
            if options.json:
                write_json(options.json, [asdict(entry) for entry, _ in sample])
    noticed = sum(bool(mutant.noticed) for mutant, _ in sample)
    print(f"{noticed} of {len(sample)} changes are noticed ({noticed / len(sample):.0%})")


if __name__ == "__main__":
    main()
