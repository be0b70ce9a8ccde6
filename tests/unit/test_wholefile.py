"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from hetero.core import InputError, MachineError
from hetero.wholefile import write_whole


def test_writes_and_replaces(tmp_path: Path) -> None:
    path, link = tmp_path / "rules.yaml", tmp_path / "link.yaml"
    write_whole(path, "one é\n", "--write")
    assert path.read_text(encoding="utf-8") == "one é\n"
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, "two\n", "--write")
    assert link.is_symlink()
    assert path.read_text() == "two\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "rules.yaml"]


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, MachineError), (errno.EACCES, InputError)])
def test_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "rules.yaml"
    path.write_text("mine\n")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(kind, match=f"--write {path}: cannot be written: {os.strerror(number)}"):
        write_whole(path, "other\n", "--write")
    assert path.read_text() == "mine\n"
    assert os.listdir(tmp_path) == ["rules.yaml"]


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--write .*none/rules.yaml: cannot be written: No such file"):
        write_whole(tmp_path / "none" / "rules.yaml", "x", "--write")


def test_what_is_no_file_is_written_to() -> None:
    write_whole(Path("/dev/null"), "x", "--write")
    assert Path("/dev/null").is_char_device()
