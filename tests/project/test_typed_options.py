"""mypy knows the options of public calls by name and type."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.cpu_only("a type checker"),
    pytest.mark.long,  # without a cache, mypy reads torch for a minute
]

ROOT = Path(__file__).resolve().parents[2]
# Each line with what mypy says of it; "" is a right call.
CALLS = {
    "import torch": "",
    "import torch_dynemb as td": "",
    "sgd, tables, weight = td.SGD(lr=0.1), [td.TableConfig('a', 4)], torch.ones(2, 4)": "",
    "td.DynamicEmbedding(4, optimizer=sgd, padding_idx=0, policy=td.Policy(capacity=9))": "",
    "td.DynamicEmbedding(4, colour=1)": '"colour" for "DynamicEmbedding"  [call-arg]',
    "td.DynamicEmbedding(4, split='yes')": 'type "str"; expected "bool"  [arg-type]',
    "td.DynamicEmbeddingBag(4, mode='sum', max_rows=9, memory_budget='4GB')": "",
    "td.DynamicEmbeddingBag(4, max_rows=1.5)": '"float"; expected "int | None"  [arg-type]',
    "td.DynamicEmbeddingBag.from_embedding(weight, device='cpu', mode='sum').mode.upper()": "",
    "td.DynamicEmbeddingBag.from_embedding(weight, sgd=sgd)": '"sgd" for "from_embedding"',
    "td.DynamicEmbeddingCollection(tables, optimizer=sgd, trainable=False)": "",
    "td.DynamicEmbeddingCollection(tables, padding_idx=0)": '"padding_idx" for "DynamicEmbeddingC',
    "td.DynamicEmbeddingBagCollection(tables, optimizer='sgd')": 'expected "OptimizerConfig | None',
    "group = td.TableGroup(tables, optimizer=sgd, max_rows=9)": "",
    "td.TableGroup(tables, optimizer=sgd, max_row=9)": 'did you mean "max_rows"?',
    "group.remove(0, score_below=3) + 1": "",
    "group.remove(0, score_below='x')": 'type "str"; expected "float | None"  [arg-type]',
}


def test_mypy_checks_options_of_calls(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "calls.py"
    program.write_text("\n".join(CALLS))
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--hide-error-context", str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    errors: dict[int, str] = {}
    for line in checked.stdout.splitlines():
        _, *parts = line.split(":", 2)
        if len(parts) == 2 and " error: " in line:
            errors[int(parts[0])] = errors.get(int(parts[0]), "") + parts[1]
    for number, (call, says) in enumerate(CALLS.items(), start=1):
        found = errors.get(number, "")
        assert says in found, checked.stdout + checked.stderr
        assert bool(says) == bool(found), f"{call}: {found}"
