"""Random weights for a tree of ``build_meta``: nothing is read, and every tensor is made where it belongs.

Values are those of the model's own initialisation, so that norms, gates and decays are sane; large tensors in
main memory repeat a short run of random numbers, and tables of many gigabytes are zeros that take no memory
until somebody writes them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hetero.core import InputError, MachineError
from hetero.hw import memory
from hetero.model.build import float32_names, target_dtype

SPARSE_BYTES = 4 * 2**30
"""Tables in main memory above this size are not filled."""

_TILED = 2**20  # values in main memory above which random numbers repeat
_PATTERN = 1_048_573  # a prime: rows begin at other places of it
_STD = 0.02
_LINEAR = "linear_attention"
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # the name came with Python 3.13


def cut_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """A configuration with its first ``layers`` layers: lists with one entry a layer are cut, layer numbers
    beyond them dropped. Raises InputError where there are fewer, or none of those attends to the past by
    keys, without which caches do not tell how long a sequence is."""
    text = next((one for one in (config, *config.values()) if isinstance(one, Mapping) and _layers(one)), {})
    count, kinds = _layers(text), text.get("layer_types")
    if count and layers > count:
        raise InputError(f"--layers {layers}: the model has {count}")
    first = int(text.get("full_attention_interval") or 0)
    if isinstance(kinds, list):
        first = next((at for at, kind in enumerate(kinds, 1) if "attention" in kind and kind != _LINEAR), 0)
    if layers < first:
        raise InputError(f"--layers {layers}: must be at least {first}, the first layer with attention")
    whole = _cut(config, layers)
    return {key: _cut(value, layers) if isinstance(value, dict) else value for key, value in whole.items()}


def _layers(config: Mapping[str, Any]) -> int:
    """Of text; towers of other media have no vocabulary."""
    count = config.get("num_hidden_layers")
    return count if isinstance(count, int) and "vocab_size" in config else 0


def _cut(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    count = config.get("num_hidden_layers")
    # Towers of other media keep what they have; no text passes them.
    if not isinstance(count, int) or count <= layers or "vocab_size" not in config:
        return dict(config)
    cut = dict(config)
    cut["num_hidden_layers"] = layers
    for key, value in config.items():
        if isinstance(value, list) and len(value) == count and "ids" not in key:
            cut[key] = value[:layers]
    if "ple_layer_ids" in config:  # count from 1
        cut["ple_layer_ids"] = [one for one in config["ple_layer_ids"] if one <= layers]
    if "mlp_only_layers" in config:
        cut["mlp_only_layers"] = [one for one in config["mlp_only_layers"] if one < layers]
    return cut


def fill_dense(
    model: Any, *, dtype: torch.dtype, device: Callable[[str], str], pin: bool = False, seed: int = 0
) -> list[str]:
    """Give a value to every parameter and buffer that is still on ``meta``, on ``device(name)``, and move the
    other buffers there. ``pin``: embeddings that stay in main memory are pinned, for kernels that read their
    rows in place. Returns what the user should know. Raises MachineError where memory is refused.
    """
    float32 = float32_names(model, dtype)
    tied = {name: source for name, source in model.all_tied_weights_keys.items() if name != source}
    notes: list[str] = []
    unset: list[tuple[str, nn.Parameter]] = []
    modules = dict(model.named_modules())
    embeddings = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for path, module in modules.items():
            for leaf, held in list(module._parameters.items()):
                name = f"{path}.{leaf}" if path else leaf
                if held is None or name in tied:
                    continue
                if held.device.type != "meta":
                    held._is_hf_initialized = True
                    continue
                where, kind = device(name), target_dtype(name, held, float32)
                is_table = id(held) in embeddings
                parameter, done = _parameter(held, kind, where, pin=pin and is_table, table=is_table)
                if done and parameter.nbytes > SPARSE_BYTES:
                    notes.append(f"{name}: {memory.gib(parameter.nbytes)} of zeros that take no memory")
                module._parameters[leaf] = parameter
                parameter._is_hf_initialized = done  # type: ignore[attr-defined]
                if not done:
                    unset.append((name, parameter))
            _buffers(module, path, device)
            module._is_hf_initialized = False
        model.initialize_weights()
        for name, parameter in unset:
            # What the model's code does not initialise it expects from a checkpoint.
            if bool(parameter.flatten()[-1].isnan()):
                parameter.normal_(std=_STD) if parameter.dim() > 1 else parameter.fill_(float("norm" in name))
    for name, source in tied.items():
        path, _, leaf = name.rpartition(".")
        origin, _, origin_leaf = source.rpartition(".")
        owner = modules.get(path)
        if owner is not None and owner._parameters.get(leaf) is not None:
            owner._parameters[leaf] = modules[origin]._parameters[origin_leaf]
    return notes


def _parameter(
    like: Tensor, dtype: torch.dtype, device: str, *, pin: bool, table: bool
) -> tuple[nn.Parameter, bool]:
    """A parameter of ``like``'s shape, and whether it has its values already; else it is NaN."""
    host = device == "cpu"
    nbytes = like.numel() * dtype.itemsize
    if host and table and nbytes > SPARSE_BYTES:
        return nn.Parameter(_sparse(like.numel(), dtype).view(like.shape), requires_grad=False), True
    try:
        value = torch.empty(like.shape, dtype=dtype, device=device, pin_memory=host and pin)
    except RuntimeError as error:  # torch's kinds of "out of memory" are all of these
        first = str(error).splitlines()[0]
        raise MachineError(f"a tensor of {memory.gib(nbytes)} on {device}: {first}") from None
    tiled = host and like.dim() > 1 and like.numel() > _TILED
    if tiled:
        pattern = torch.randn(_PATTERN).mul_(_STD).to(dtype)
        flat = value.view(-1)
        for at in range(0, flat.numel(), _PATTERN):
            part = flat[at : at + _PATTERN]
            part.copy_(pattern[: part.numel()])
    else:
        value.fill_(float("nan"))
    return nn.Parameter(value, requires_grad=False), tiled


def _sparse(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros over memory that the system has promised to nobody, so that more than there is can be had."""
    nbytes = count * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    try:
        pages = mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MachineError(f"{memory.gib(nbytes)} of address space for a table: {reason}") from None
    return torch.frombuffer(pages, dtype=dtype)


def _buffers(module: nn.Module, path: str, device: Callable[[str], str]) -> None:
    """Learned buffers become zeros, all go to their device."""
    for leaf, buffer in module._buffers.items():
        if buffer is None:
            continue
        where = device(f"{path}.{leaf}" if path else leaf)
        on_meta = buffer.device.type == "meta"
        value = torch.zeros_like(buffer, device=where) if on_meta else buffer.to(where)
        value._is_hf_initialized = True  # type: ignore[attr-defined]
        module._buffers[leaf] = value
