"""Size and shape of the code: lines of each folder, files of each package, long files and long functions.

python benchmarks/structure.py
python benchmarks/structure.py OTHER_CHECKOUT
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

FOLDERS = ("riptide", "retriever", "indexing", "serve", "jobs", "benchmarks", "tests")
LONG_FILE, LONG_FUNCTION = 400, 50  # lines


def functions_of(path: Path) -> list[tuple[int, str]]:
    """Returns the lines of each function of a file without its docstring, and the name of the function."""
    functions = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False) or ""
            functions.append(((node.end_lineno or 0) - node.lineno + 1 - len(docstring.splitlines()), node.name))
    return functions


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    sizes: list[int] = []
    long_files: list[str] = []
    long_functions: list[str] = []
    for folder in FOLDERS:
        files = sorted((root / folder).rglob("*.py"))
        lines = {file: len(file.read_text().splitlines()) for file in files}
        packages: dict[Path, int] = {}
        for file in files:
            packages[file.parent] = packages.get(file.parent, 0) + (file.name != "__init__.py")
        print(f"{folder}: {sum(lines.values()):,} lines, {len(files)} files")
        if folder in ("benchmarks", "tests"):
            continue
        inner = {package: count for package, count in packages.items() if package != root / folder}
        print("  " + ", ".join(f"{package.name} {count}" for package, count in inner.items()))
        print(f"  in no package: {packages[root / folder]} files")
        sizes += inner.values()
        long_files += [f"{file.relative_to(root)} {size}" for file, size in lines.items() if size > LONG_FILE]
        for file in files:
            long_functions += [
                f"{file.relative_to(root)}:{name} {size}" for size, name in functions_of(file) if size > LONG_FUNCTION
            ]
    print(f"packages: {len(sizes)}, of which {sum(not 4 <= size <= 14 for size in sizes)} have not 4 to 14 files")
    print(f"files above {LONG_FILE} lines: {len(long_files)}\n  " + "\n  ".join(long_files))
    print(f"functions above {LONG_FUNCTION} lines: {len(long_functions)}\n  " + "\n  ".join(long_functions))


if __name__ == "__main__":
    main()
