"""Tables of expert choices: their statistics, and their files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hetero.core import InputError
from hetero.report.routing import load_table, make_table, measured_reuse, save_table


def test_tokens_choose_different_experts() -> None:
    for kind in ("uniform", "local"):
        for experts, top_k in ((32, 4), (4, 3), (2, 2), (5, 1)):
            table = make_table(kind, layers=3, steps=40, rows=2, experts=experts, top_k=top_k, seed=1)
            assert table.shape == (3, 40, 2, top_k)
            assert table.dtype == np.int32
            assert 0 <= table.min() <= table.max() < experts
            assert all(len(set(row)) == top_k for row in table.reshape(-1, top_k).tolist())


def test_local_choices_repeat_as_published() -> None:
    """The engine that this is compared with draws by a loop; its tables have 41% and 79%."""
    table = make_table("local", layers=8, steps=300, rows=2, experts=512, top_k=10)
    reuse = measured_reuse(table, most_layers=8)
    assert reuse.last == pytest.approx(0.41, abs=0.02)
    assert reuse.window == pytest.approx(0.79, abs=0.02)


def test_uniform_choices_repeat_by_chance_alone() -> None:
    reuse = measured_reuse(make_table("uniform", layers=4, steps=300, rows=2, experts=512, top_k=10))
    assert reuse.last == pytest.approx(10 / 512, abs=0.005)
    assert reuse.window == pytest.approx(1 - (1 - 10 / 512) ** 8, abs=0.02)
    table = make_table("uniform", layers=2, steps=500, rows=2, experts=16, top_k=4)
    counts = np.bincount(table.ravel(), minlength=16) / table.size
    assert counts == pytest.approx(1 / 16, abs=0.02)


def test_reuse_is_counted_against_a_plain_loop() -> None:
    table = make_table("local", layers=2, steps=40, rows=1, experts=24, top_k=3, seed=5)
    last = window = total = 0
    for layer in table[:, :, 0].tolist():
        for step in range(8, 40):
            now = set(layer[step])
            last += len(now & set(layer[step - 1]))
            window += len(now & {e for before in layer[step - 8 : step] for e in before})
            total += 3
    reuse = measured_reuse(table)
    assert (reuse.last, reuse.window) == (pytest.approx(last / total), pytest.approx(window / total))


def test_a_table_can_be_replayed(tmp_path: Path) -> None:
    table = make_table("local", layers=3, steps=20, rows=2, experts=16, top_k=2)
    path = tmp_path / "table.npy"
    save_table(path, table)
    sizes = {"experts": 16, "top_k": 2}
    assert np.array_equal(load_table(path, layers=3, rows=2, **sizes), table)
    assert np.array_equal(load_table(path, layers=2, rows=1, **sizes), table[:2, :, :1])
    more = load_table(path, layers=3, rows=5, **sizes)
    assert more.shape == (3, 20, 5, 2)
    assert np.array_equal(more[:, :, :2], table)
    assert not np.array_equal(more[:, :, 2:4], table)
    save_table(path, table[:, :, 0])
    assert np.array_equal(load_table(path, layers=3, rows=1, **sizes), table[:, :, :1])


def test_a_file_that_is_no_table_is_told(tmp_path: Path) -> None:
    path, sizes = tmp_path / "table.npy", {"layers": 2, "experts": 8, "top_k": 2, "rows": 1}
    with pytest.raises(InputError, match="cannot be read: No such file"):
        load_table(path, **sizes)
    path.write_text("hello")
    with pytest.raises(InputError, match=r"table\.npy: no \.npy file of numbers"):
        load_table(path, **sizes)
    good = np.array([[[0, 1]] * 4] * 2, np.int32)
    for bad, why in (
        (good.astype(float), "array of integers"),
        (good[0], r"shape \[4, 2\]"),
        (good[:1], "1 layers with 2 experts a token; the model has 2"),
        (np.concatenate([good, good + 2], 2), "4 experts a token; the model has 2 with 2"),
        (good + 7, "ids from 7 to 8; the model has 8"),
        (good * 0, "chooses an expert twice"),
    ):
        np.save(path, bad)
        with pytest.raises(InputError, match=why):
            load_table(path, **sizes)


def test_kinds_are_checked() -> None:
    with pytest.raises(
        InputError, match="--routing lokal: must be one of router, uniform, local or trace:FILE"
    ):
        make_table("lokal", layers=1, steps=1, rows=1, experts=4, top_k=2)
    with pytest.raises(InputError, match="5 experts a token of 4"):
        make_table("local", layers=1, steps=1, rows=1, experts=4, top_k=5)
