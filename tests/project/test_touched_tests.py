"""The long tests that a change touches are found by imports."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("reads sources")

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "torch_dynemb"


@pytest.fixture(autouse=True)
def tools_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS / "tools"))


def test_attributes_of_the_package_count_as_imports(tmp_path: Path) -> None:
    import touched_tests

    test = tmp_path / "test_new.py"
    test.write_text("import torch_dynemb as td\nfrom ranks import Ranks\ntd.top_k(1, td.Adam())\n")
    near = touched_tests.imported_files(test)
    assert {PACKAGE / "retrieval" / "search.py", TESTS / "ranks.py"} <= near
    assert PACKAGE / "__init__.py" not in near  # it imports all of the package
    far = touched_tests.distances(test)
    assert far[TESTS / "started.py"] == 2


@pytest.mark.long
def test_only_files_that_reach_the_change_are_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import touched_tests

    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_near.py").write_text("import ranks\nimport pytest\nx = pytest.mark.long\n")
    (tests / "test_far.py").write_text("import small_embeddings, pytest\nx = pytest.mark.long\n")
    (tests / "test_short.py").write_text("import ranks\n")
    monkeypatch.setattr(touched_tests, "ROOT", tmp_path)
    found = touched_tests.touched_tests({TESTS / "ranks.py"})
    assert found == [tests / "test_near.py"]
    assert touched_tests.touched_tests(set()) == []
