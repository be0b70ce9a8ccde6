"""What a name of the Hub means, and which files of a repository, or of its copy here, a model takes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from hetero import jsonfile

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = "*.safetensors"
# What is read beside the weights, in the repository's top folder.
SMALL = (
    CONFIG,
    "generation_config.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.tiktoken",
    "tiktoken.model",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
# GGUF files that are no language models.
_BESIDE = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_QUANTISATION = re.compile(
    r"(?:UD-)?(?:IQ\d\w*|Q\d\w*|TQ\d\w*|BF16|F16|F32|FP8\w*|MXFP4\w*|NVFP4\w*)(?![A-Za-z0-9])", re.IGNORECASE
)
_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<quant>[\w.-]+)|/(?P<file>[^:]+\.gguf))?"
)


@dataclass(frozen=True, slots=True)
class HubName:
    """``owner/name``, ``owner/name:QUANTISATION`` or ``owner/name/FILE.gguf``."""

    repo: str
    quant: str | None = None
    file: str | None = None  # in the repository

    @property
    def short(self) -> str:
        """The repository's name without its owner."""
        return self.repo.partition("/")[2]

    @property
    def wants_gguf(self) -> bool:
        return self.quant is not None or self.file is not None


def parse_name(text: str) -> HubName | None:
    """What ``text`` names on the Hub; None for what can be no such name."""
    found = _NAME.fullmatch(text)
    if found is None or found["repo"].endswith((".gguf", ".json")):
        return None
    return HubName(found["repo"], found["quant"], found["file"])


def group_gguf(paths: Iterable[str]) -> dict[str, list[str]]:
    """GGUF files by what distinguishes them: the quantisation, where that names one model; parts in order."""
    models: dict[str, list[str]] = {}
    for path in sorted(paths):
        if path.lower().endswith(".gguf") and not _BESIDE.search(PurePosixPath(path).name):
            models.setdefault(_PART.sub("", path[: -len(".gguf")]), []).append(path)
    labels = {stem: _quantisation(stem) for stem in models}
    return {
        label if list(labels.values()).count(label) == 1 else stem: models[stem]
        for stem, label in labels.items()
    }


def _quantisation(stem: str) -> str:
    found = _QUANTISATION.findall(PurePosixPath(stem).name) or _QUANTISATION.findall(stem)
    return str(found[-1]) if found else PurePosixPath(stem).name


def choose_gguf(labels: Sequence[str], asked: str | None) -> str | None:
    """The label that ``asked`` means, or the only one where nothing is asked; None: no one of them."""
    if asked is None:
        return labels[0] if len(labels) == 1 else None
    for same in (str.lower, lambda label: label.lower().removeprefix("ud-")):
        found = [label for label in labels if same(label) == asked.lower()]
        if len(found) == 1:
            return found[0]
    return None


def whole(folder: Path, name: HubName, weights: bool) -> Path | None:
    """The model of a folder that looks like a revision of its repository: the folder, or the GGUF file (the
    first of its parts) that ``name`` means. None where something is missing; without ``weights`` a
    configuration is enough.
    """
    there = {
        path.relative_to(folder).as_posix(): path
        for path in (folder.rglob("*") if folder.is_dir() else ())
        if path.is_file()
    }
    if name.wants_gguf or not has(there, WEIGHTS):
        groups = group_gguf(there)
        chosen = chosen_group(groups, name)
        if chosen is not None and parts(chosen) == len(chosen):
            return folder / chosen[0]
        return folder if not weights and CONFIG in there else None
    if CONFIG not in there:
        return None
    if not weights or SINGLE in there:
        return folder
    if INDEX not in there:
        return folder
    try:
        shards: Any = jsonfile.parse(there[INDEX].read_bytes())["weight_map"].values()
        return folder if all(shard in there for shard in shards) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def chosen_group(groups: Mapping[str, Sequence[str]], name: HubName) -> Sequence[str] | None:
    """The files that ``name`` means among those of ``group_gguf``; None: none, or not one of several."""
    if name.file is not None:
        return next((paths for paths in groups.values() if name.file in paths), None)
    label = choose_gguf(list(groups), name.quant)
    return None if label is None else groups[label]


def parts(paths: Sequence[str]) -> int:
    """How many files a model is split into, by the name of the first."""
    found = _PART.search(PurePosixPath(paths[0]).stem)
    return 1 if found is None else int(found[2])


def has(paths: Iterable[str], *patterns: str) -> bool:
    """Whether one of the paths is as a pattern says, in the folder that the pattern says."""
    return any(fits(path, one) for path in paths for one in patterns)


def fits(path: str, pattern: str) -> bool:
    """``fnmatch`` whose star matches no slash."""
    return path.count("/") == pattern.count("/") and fnmatch(path, pattern)


def is_plain(path: str) -> bool:
    """Whether a path of a listing stays below the folder that it is put into."""
    pure = PurePosixPath(path)
    return not pure.is_absolute() and all(part not in ("", ".", "..") for part in path.split("/"))
