"""Notebooks executed as plain Python: `python tests/notebook.py docs/first_study.ipynb` stores its cells' outputs.

The cells run in order in one namespace and an empty working directory. Jupyter is not needed.
"""

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def code_cells(notebook: dict) -> list[dict]:
    """The cells with code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(notebook: dict) -> None:
    """Run the code cells in the working directory, and store what each prints and its last value as Jupyter does."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), 1):
        source, printed = "".join(cell["source"]), io.StringIO()
        tree, name, value = ast.parse(source), f"cell {number}", None
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            exec(compile(tree, name, "exec"), namespace)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        outputs = []
        if text := printed.getvalue():
            outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
        if value is not None:
            data = {kind: shown.splitlines(keepends=True) for kind, shown in _shown(value).items()}
            outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
        cell |= {"execution_count": number, "outputs": outputs}


def _shown(value: Any) -> dict[str, str]:
    if isinstance(value, Figure):
        image = io.BytesIO()
        value.savefig(image, format="png", dpi=100)
        return {"text/plain": "<Figure>", "image/png": base64.b64encode(image.getvalue()).decode() + "\n"}
    as_html = {"text/html": value._repr_html_()} if hasattr(value, "_repr_html_") else {}
    return {"text/plain": repr(value)} | as_html


if __name__ == "__main__":
    path = Path(sys.argv[1]).resolve()
    notebook = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        execute(notebook)
        os.chdir(path.parent)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
