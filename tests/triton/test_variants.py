"""The comparison of variants that a GPU machine runs, by the kernels' interpreter: that it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripts import script as load

pytest.importorskip("triton", reason="triton is not installed")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the script itself runs on a GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter's numpy
]


@pytest.fixture(scope="module")
def script() -> Any:
    return load("benchmarks/step_variants.py")


def test_every_variant_has_its_lines(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["late, after, split of one row", "early, soon, two moves", "no share, soon"]
    some = tuple(one for one in script.VARIANTS if one.name in names)
    monkeypatch.setattr(script, "VARIANTS", some)
    given = "--device cpu --shape 12 32 16 2 --layers 1 --rows 2 --slots 9 --warm 2 --steps 2"
    target = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["step_variants.py", *given.split(), "--json", str(target)])
    script.main()
    result = json.loads(target.read_text())
    told = [(line["variant"], line["routing"]) for line in result["steps"]]
    assert told == [(one.name, kind) for one in some for kind in ("local", "uniform")]
    for line in result["steps"]:
        assert line["gpu"] + line["pcie"] + line["cpu"] > 0
        assert line["us_a_layer"] > 0
        assert line["pcie"] == 0 or not line["variant"].startswith("no share")
    assert "2 rows, uniform: best" in capsys.readouterr().out
